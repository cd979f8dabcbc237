"""What every rank runs in the tests of experts that are spread over ranks, under an engine."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offload
from offload.errors import OffloadError
from offload.moe import MoE
from tests.offload.engine_cases import NVME, WIDTH, TinyLM, batches, config, states_of
from tests.ranks.programs import BUDGET, OPTIMIZER, Case
from tests.ranks.test_rank_checkpoints import steps

EXPERTS = 4


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH, bias=False))


class MoEBlock(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, expert, EXPERTS, k=2, top2_2nd_expert_sampling=False, **options)
        self.l_aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y, self.l_aux, _ = self.moe(self.norm(x))
        return x + y


class MoELM(TinyLM):
    """The same values on every rank, whatever `ep_size`."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        super().__init__(blocks=1)
        self.blocks.extend(MoEBlock(**options) for _ in range(2))

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + 0.01 * sum(block.l_aux for block in self.blocks[1:])


class BranchingLM(MoELM):
    """Between its layers of experts each rank uses every other of some dense ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks.extend(MoEBlock(**options) for _ in range(2))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.blocks)
        self.calls = dist.get_rank()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        self.calls += 1
        for block, branch in zip(self.blocks, self.branches, strict=True):
            x = block(x)
            if self.calls % 2:
                x = x + branch(x)
        return self.head(self.norm(x))


def spread(ep_size: int, **options: Any) -> partial[MoELM]:
    return partial(MoELM, ep_size=ep_size, drop_tokens=False, **options)


def case(
    ep_size: int, stage: int, placement: Mapping[str, Any] = NVME,
    kind: type[MoELM] = MoELM, **keys: Any,
) -> Case:  # fmt: skip
    model = partial(kind, ep_size=ep_size, drop_tokens=False)
    return Case(stage, dict(placement), model, **keys)


def keys_of(folder: str, stage: int, **keys: Any) -> dict[str, Any]:
    return config(
        Path(folder), NVME, budget=BUDGET, optimizer=OPTIMIZER, zero={"stage": stage},
        clip_grad_norm=0.5, **keys,
    )  # fmt: skip


def save(folder: str, ep_size: int, name: str) -> list[dict[str, Tensor]]:
    """The states of a step, which are saved, and of one more."""
    with offload.initialize(spread(ep_size)(), keys_of(folder, 2, precision="bf16")) as engine:
        steps(engine, 0, 1)
        engine.save_checkpoint(Path(folder) / name)
        then = states_of(engine)
        steps(engine, 1, 2)
        return [then, states_of(engine)]


def load(folder: str, ep_size: int, name: str) -> list[dict[str, Tensor]]:
    """The states that were loaded, and those of one more step."""
    model = spread(ep_size)()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    with offload.initialize(model, keys_of(folder, 3, precision="bf16")) as engine:
        engine.load_checkpoint(Path(folder) / name)
        then = states_of(engine)
        steps(engine, 1, 2)
        return [then, states_of(engine)]


def save_and_load(folder: str, ways: list[tuple[int, int]]) -> dict[str, list[dict[str, Tensor]]]:
    """`ways`: the ep_size of what is saved, and of what loads it."""
    states = {}
    for saved, loaded in ways:
        if f"{saved}" not in states:
            states[f"{saved}"] = save(folder, saved, f"of {saved}")
        states[f"{saved} {loaded}"] = load(folder, loaded, f"of {saved}")
    return states


def use_gradients_and_values(folder: str) -> tuple[list[str], list[float], list[str]]:
    """Gradients that this rank has, halved; the norms by parameter; what a write on the last rank
    has changed here."""
    with offload.initialize(spread(2)(), keys_of(folder, 3, precision="bf16")) as engine:
        steps(engine, 0, 1)
        engine.backward(engine.module.loss(batches(2)[dist.get_rank()]))  # type: ignore[operator]
        norms = []
        for param in engine.module.parameters():
            if param.grad is not None:
                before = torch.linalg.vector_norm(param.grad)
                param.grad.mul_(0.5)
                after = engine.gradient(param)
                assert after is not None, "it is there"
                norms.append(float(before / after.float().norm()))
        engine.optimizer.step()
        before = states_of(engine)
        with engine.gathered(), torch.no_grad():
            if dist.get_rank() == 1:
                engine.module.get_parameter("blocks.1.moe.experts.2.0.weight").fill_(3.0)
        after = states_of(engine)
        changed = [name for name in after if not torch.equal(before[name], after[name])]
        return changed, norms, [name for name in before if ".experts." in name]


def set_ones(engine: offload.Engine) -> None:
    for param in engine.module.parameters():
        if param.grad is not None:
            param.grad = torch.ones(param.shape)
    engine.optimizer.step()


def clip_by_own_norm(engine: offload.Engine) -> None:
    nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    engine.optimizer.step()


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)


def tied() -> nn.Module:
    layer = MoE(WIDTH, expert, EXPERTS, ep_size=2)
    one, other = layer.experts.children()
    one[0].weight = other[0].weight  # type: ignore[index,union-attr]
    return layer


def of_two_sizes() -> nn.Module:
    return nn.ModuleList(MoE(WIDTH, expert, EXPERTS, ep_size=size) for size in (2, 4))


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(folder: str) -> list[str]:
    keys = keys_of(folder, 2)
    mesh = init_device_mesh("cpu", (2,))
    messages = [
        said(partial(offload.initialize, tied(), keys)),
        said(partial(offload.initialize, MoE(WIDTH, WithBuffer, EXPERTS, ep_size=2), keys)),
        said(partial(offload.initialize, spread(1 + dist.get_rank())(), keys)),
        said(partial(offload.initialize, spread(2)(), keys, mesh=mesh)),
        said(partial(offload.initialize, MoE(WIDTH, expert, EXPERTS, ep_size=2).experts, keys)),
    ]
    for act in (set_ones, clip_by_own_norm):
        with offload.initialize(spread(2)(), keys) as engine:
            steps(engine, 0, 1)
            engine.backward(engine.module.loss(batches(2)[dist.get_rank()]))  # type: ignore[operator]
            messages.append(said(partial(act, engine)))
    return messages


def refusals_of_four(folder: str) -> str:
    return said(partial(offload.initialize, of_two_sizes(), keys_of(folder, 2)))
