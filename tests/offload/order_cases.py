"""A small model trained in a `CheckedWorld`, for tests of the order of its accesses to memory."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch import Tensor, nn

import offload
import offload.memory.tier_manager
import offload.planning.plan.plan
import offload.swap.activations.activation_returns
import offload.swap.activations.activations
import offload.tiered_model
from offload.errors import BudgetError
from tests.offload.engine_cases import HOST, VOCABULARY, batches, config, plan_for_a_gpu, seeded
from tests.offload.engine_states import losses_of
from tests.swap.checked_world import CheckedWorld

KIB = 1 << 10
ROOMY = {"device": 2048, "host": 16384, "nvme": 65536}  # KiB
SLOT = 16  # KiB: more than one of a block's parameters


class Block(nn.Module):
    """Two chunks of parameters, as few tensors as may be: each costs an interpreted kernel."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16) if norm else nn.Identity()
        self.up = nn.Linear(16, 96, bias=False)
        self.down = nn.Linear(96, 16, bias=False)

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        y = self.up(self.norm(x)) if whole else x.repeat(1, 1, 6)
        y = self.down(nn.functional.gelu(y))
        return x + y


class Net(nn.Module):
    """An embedding, blocks, a tied head."""

    def __init__(self, blocks: int = 4, *, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(blocks))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.whole = True  # else the first half of each block gets no gradient

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, whole=self.whole)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def on_a_checked_device(patch: pytest.MonkeyPatch, **options: Any) -> CheckedWorld:
    """Engines plan as for a GPU of 1 GiB whose kernels run, and get streams whose order is
    checked. Everything is worth moving; copies may hold little."""
    plan_for_a_gpu(patch, kernels_missing=None)
    patch.setattr(offload.swap.activations.activations, "MIN_NBYTES", 1)
    patch.setattr(offload.swap.activations.activation_returns, "DEVICE_NBYTES", 8 * KIB)
    patch.setattr(offload.planning.plan.plan, "MIN_WINDOW_NBYTES", 16 * KIB)
    world = CheckedWorld(patch, **options)
    patch.setattr(offload.memory.tier_manager, "DeviceHomes", world.device_homes)
    return world


Loop = Callable[[offload.Engine, list[Tensor], int], object]


def dropping(engine: offload.Engine, data: list[Tensor], accumulate: int) -> None:
    """Gradients are dropped as soon as they are made, whole and in part."""
    for whole in (True, False):
        engine.module.whole = whole
        engine.backward(engine.module.loss(data[0]))
        engine.optimizer.zero_grad()
    engine.module.whole = True
    losses_of(engine, data, accumulate)


def forward_last(engine: offload.Engine, data: list[Tensor], accumulate: int) -> None:
    """After the step comes a forward whose backward never comes."""
    losses_of(engine, data, accumulate)
    engine.module.loss(data[0])


def writing(engine: offload.Engine, data: list[Tensor], accumulate: int) -> None:
    """After the step users write to a parameter."""
    losses_of(engine, data, accumulate)
    weight = engine.module.blocks[1].up.weight
    with engine.gathered(weight):
        weight.data.mul_(1.01)


def loading(engine: offload.Engine, data: list[Tensor], accumulate: int) -> None:
    """After the step the model's values are read and loaded, and the optimizer's."""
    losses_of(engine, data, accumulate)
    model, optimizer = engine.module, engine.optimizer
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict())


def saving(engine: offload.Engine, data: list[Tensor], accumulate: int) -> None:
    """After the step comes a save beside the next one: its bytes are those of the step before."""
    losses_of(engine, data, accumulate)
    with TemporaryDirectory() as name:
        waited, behind = Path(name) / "waited", Path(name) / "behind"
        engine.save_checkpoint(waited)
        gc.disable()  # garbage of the save's thread, found here, would count as not ordered
        engine.save_checkpoint(behind, wait=False)
        losses_of(engine, data, accumulate)
        engine.checkpoint_saved()
        gc.enable()
        for file in waited.rglob("*.safetensors"):
            assert file.read_bytes() == (behind / file.relative_to(waited)).read_bytes()


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train, where. `room`: KiB more than the least on the device and on the host; None
    where nothing is short."""

    placement: dict[str, Any]
    room: tuple[int, int] | None = None
    accumulate: int = 1
    loop: Loop = losses_of
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)

    def train(self, world: CheckedWorld, folder: Path, steps: int = 3) -> None:
        """A few steps, and the engine's end; sooner, once a race is found."""
        data = batches(self.accumulate)
        with offload.initialize(seeded(Net), self._settings(folder)) as engine:
            for _ in range(steps):
                with world.training():
                    self.loop(engine, data, self.accumulate)
                if world.races:
                    return

    def _settings(self, folder: Path) -> dict[str, Any]:
        optimizer = {"chunk": 2048, "lr": 3e-3, **self.keys.get("optimizer", {})}
        settings = config(
            folder,
            {**HOST, **self.placement},
            device="cpu",
            **{**self.keys, "optimizer": optimizer},
        )
        budget = dict(ROOMY)
        if self.room is not None:
            for tier, more in zip(("device", "host"), self.room, strict=True):
                budget[tier] = self._least(settings, budget, tier) + more
        return {**settings, "budget": in_kib(budget)}

    def _least(self, settings: dict[str, Any], budget: dict[str, int], tier: str) -> int:
        """The KiB that a refusal asks for."""
        short = {**settings, "budget": in_kib({**budget, tier: 4})}
        with pytest.raises(BudgetError) as refusal:
            offload.initialize(seeded(Net), short)
        needed = re.search(r"of the ([\d.]+) KiB needed", str(refusal.value))
        assert needed, str(refusal.value)
        return int(float(needed[1]))


def in_kib(budget: dict[str, int]) -> dict[str, str]:
    return {tier: f"{size}KiB" for tier, size in budget.items()}
