"""Saved activations away from the device, and blocks that compute theirs again: the same bits."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
import offload.planning.plan.plan
import offload.swap.activations.activations
import offload.tiered_model
from offload.errors import BudgetError, UnsupportedError
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    ON,
    config,
    min_budget,
    on_the_cpu_alone,
    plan_for_a_gpu,
    said_by,
    seeded,
)
from tests.offload.engine_states import assert_same_bits, gradients_of, train_step

pytestmark = MARKS

PROGRAM = Path(__file__).with_name("memory_program.py")
WIDTH, LENGTH, BATCH, VOCABULARY = 32, 16, 4, 37
KIB, MIB = 1 << 10, 1 << 20


class Calls:
    """Counted where recomputation does not hide them."""

    number = 0


class Block(nn.Module):
    """Attention over views of one projection, an in-place addition, dropout twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.drop = nn.Dropout(0.2)
        self.calls = Calls()

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.calls.number += 1
        split = [
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        y: Tensor = self.mlp(x)
        y += 1
        return x + self.drop(y if scale is None else y * scale)


class Model(nn.Module):
    """`inner`: the middle block is checkpointed by the model itself."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scale = x.detach().abs().mean(-1, keepdim=True).expand(-1, -1, WIDTH)
        for index, block in enumerate(self.blocks):
            if self.inner and index == 1:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, scale=scale)
        logits: Tensor = self.head(x)
        return logits


def tokens_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(ON)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is worth moving, and a window holds a fraction of what is saved."""
    monkeypatch.setattr(offload.swap.activations.activations, "MIN_NBYTES", 1)
    monkeypatch.setattr(offload.planning.plan.plan, "MIN_WINDOW_NBYTES", 64 * KIB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as for a machine with a GPU: host memory stands in for its memory."""
    plan_for_a_gpu(monkeypatch)


def keys(folder: Path, tier: str, check: Any = False, placement: Any = HOST, **more: Any) -> Any:
    placed = {**placement, "activations": {"tier": tier, "checkpoint": check}}
    return config(folder, placed, optimizer={"lr": 3e-3, "chunk": 2048}, **more)


def tight(settings: dict[str, Any]) -> dict[str, Any]:
    """The least host budget: what a refusal asks for has to be enough."""
    return {**settings, "budget": min_budget(Model, settings)}


@dataclasses.dataclass
class Run:
    losses: list[float]
    states: dict[str, Tensor]
    moved: dict[str, int]
    calls: int  # of one block

    def assert_same(self, other: Run) -> None:
        assert self.losses == other.losses
        assert_same_bits(self.states, other.states)


def train(settings: Any, build: Callable[[], nn.Module] = Model, steps: int = 3) -> Run:
    model: Any = seeded(build)
    with offload.initialize(model, settings) as engine:
        torch.manual_seed(5)  # of dropout
        losses = []
        for step in range(steps):
            loss = loss_of(model, tokens_of(step))
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        states = {name: value.clone() for name, value in model.state_dict().items()}
        assert_nothing_left(engine)
        report = engine.report()
        for name, tier in report.tiers.items():
            assert tier.peak_nbytes <= tier.budget_nbytes, name
        calls = model.blocks[0].calls.number if hasattr(model, "blocks") else 0
        return Run(losses, states, report.bytes_moved, calls)


def assert_nothing_left(engine: offload.Engine) -> None:
    engine.settle()
    engine.check_integrity()
    tier = engine._tier_manager.activations
    if tier is not None:
        assert tier.parked_nbytes == 0
        on_disk = engine.report().tiers.get("nvme")
        assert on_disk is None or on_disk.by_class.get("activations", 0) == 0


@functools.cache
def reference(folder: Path, precision: str = "fp32", **more: Any) -> Run:
    return train(keys(folder, "device", precision=precision, **more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swap")


# ------------------------------------------------------------------------------ same bits
@pytest.mark.sample(3)
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["on host", "on nvme"])
@pytest.mark.parametrize("check", [False, True, "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_on_nvme_train_to_the_same_bits(
    folder: Path, placement: Any, check: Any, precision: str
) -> None:
    run = train(tight(keys(folder, "nvme", check, placement, precision=precision)))
    run.assert_same(reference(folder, precision))
    assert run.moved["activations parked"] > 0
    assert run.moved["activations stayed"] == 0
    if placement is HOST and check is not True:
        assert run.moved["nvme write"] > 0
        assert run.moved["nvme read"] > 0
    assert run.calls == (3 if check is False else 6)


@pytest.mark.parametrize(("check", "placement"), [(True, NVME), ("selective", HOST)], ids=str)
def test_recomputed_blocks_train_to_the_same_bits(folder: Path, check: Any, placement: Any) -> None:
    run = train(tight(keys(folder, "device", check, placement)))
    run.assert_same(reference(folder))
    assert run.calls == 6


@pytest.mark.sample(3)
@pytest.mark.parametrize("check", [False, True, "selective"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["on host", "on nvme"])
def test_activations_away_from_a_gpu_train_to_the_same_bits(
    folder: Path, gpu: None, tier: str, check: Any, placement: Any
) -> None:
    settings = keys(folder, tier, check, placement)
    run = train(tight(settings) if tier == "nvme" else settings)
    run.assert_same(reference(folder))
    assert run.moved["activations parked"] > 0
    assert run.moved["activations stayed"] == 0


@pytest.mark.parametrize("check", [False, True])
def test_a_checkpoint_of_the_models_own_inside_trains_to_the_same_bits(
    folder: Path, check: bool
) -> None:
    """A model that checkpoints its blocks itself is left alone."""
    run = train(tight(keys(folder, "nvme", check)), lambda: Model(inner=True))
    plain = train(keys(folder, "device"), lambda: Model(inner=True))
    run.assert_same(plain)


# ------------------------------------------------------------------------------ all ends
@pytest.fixture
def engine(folder: Path) -> Any:
    with offload.initialize(seeded(Model), tight(keys(folder, "nvme"))) as made:
        yield made


def test_several_forwards_before_any_backward_in_any_order(folder: Path) -> None:
    def gradients(tier: str) -> dict[str, Tensor]:
        settings = keys(folder, tier, gradient_accumulation_steps=3)
        with offload.initialize(
            seeded(Model), settings if tier == "device" else tight(settings)
        ) as e:
            torch.manual_seed(5)
            losses = [loss_of(e.module, tokens_of(seed)) for seed in range(3)]
            for index in (1, 0, 2):
                losses[index].backward(retain_graph=index == 0)
            losses[0].backward()
            del losses
            of_name = {n: e.gradient(p) for n, p in e.module.named_parameters()}
            assert_nothing_left(e)
            return {n: g for n, g in of_name.items() if g is not None}

    assert_same_bits(gradients("nvme"), gradients("device"))


def test_an_abandoned_graph_leaves_nothing(engine: offload.Engine) -> None:
    loss = loss_of(engine.module, tokens_of(0))
    assert engine._tier_manager.activations.parked_nbytes > 0
    assert engine.report().tiers["nvme"].by_class["activations"] > 0
    del loss
    assert_nothing_left(engine)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_on_the_way_leaves_nothing(engine: offload.Engine, where: str) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    def run() -> None:
        model: Any = engine.module
        if where == "forward":
            hook = model.blocks[2].mlp.register_forward_hook(fails)
        else:
            hook = model.blocks[1].register_forward_hook(
                lambda m, args, out: (out.register_hook(fails), out)[1]
            )
        try:
            with pytest.raises(RuntimeError, match="on purpose"):
                loss_of(model, tokens_of(0)).backward()
        finally:
            hook.remove()

    run()
    gc.collect()  # the exception's frames
    engine.optimizer.zero_grad()
    assert_nothing_left(engine)


def test_inputs_and_buffers_stay_where_they_are(folder: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mask", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x) * self.mask
            return result

    with offload.initialize(seeded(Masked), keys(folder, "nvme")) as e:
        out = e.module(torch.ones(64, WIDTH, device=ON))
        assert e._tier_manager.activations.parked_nbytes == 0
        out.sum().backward()


# ------------------------------------------------------------------------------ said, refused
def said(caplog: pytest.LogCaptureFixture, fragment: str) -> int:
    return sum(fragment in record.getMessage() for record in caplog.records)


@on_the_cpu_alone("the device is the host")
def test_tier_host_without_a_gpu_changes_nothing(folder: Path) -> None:
    run = train(keys(folder, "host"))
    run.assert_same(reference(folder))
    assert "activations parked" not in run.moved


def test_a_model_without_repeated_blocks_is_told_that_nothing_is_recomputed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        offload.initialize(nn.Linear(WIDTH, WIDTH), keys(folder, "device", True)).close()
    assert said(caplog, "recomputes nothing") == 1
    assert said(caplog, "groups.blocks") == 1


class Noisy(Model):
    """Its blocks scale by random numbers of their own: a shared generator's, and Python's."""

    class Block(nn.Module):
        def __init__(self, shared: torch.Generator) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.noise = shared
            self.python = random.Random(3)

        def forward(self, x: Tensor) -> Tensor:
            scale = torch.rand(x.shape, generator=self.noise) + self.python.random()
            y: Tensor = self.linear(x).tanh() * scale.to(x.device) * x.sigmoid()
            return x + y

    def __init__(self) -> None:
        super().__init__()
        shared = torch.Generator().manual_seed(3)
        self.blocks = nn.ModuleList(self.Block(shared) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def test_generators_of_a_recomputed_block_draw_the_same_numbers_again(folder: Path) -> None:
    plain, model = seeded(Noisy).to(ON), seeded(Noisy)
    with offload.initialize(model, keys(folder, "device", "selective")) as e:
        for seed in (0, 1):  # the second forward goes on where the first one was
            loss_of(plain, tokens_of(seed)).backward()
            loss_of(model, tokens_of(seed)).backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert_same_bits(gradients_of(e), expected)


def test_a_cache_given_to_a_recomputed_block_is_refused_by_name(folder: Path) -> None:
    class GrowingCache:
        def update(self, key: Tensor) -> None: ...

        def get_seq_length(self) -> int:
            return 0

    class Cached(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.blocks[0](self.embed(tokens), scale=GrowingCache())  # type: ignore[no-any-return]

    with (
        offload.initialize(seeded(Cached), keys(folder, "device", True)) as e,
        pytest.raises(UnsupportedError, match=r"blocks.0 is given a GrowingCache.*use_cache=False"),
    ):
        e.module(tokens_of(0))


def test_transformers_own_checkpointing_is_not_doubled(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def build(own: bool) -> Any:
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48,
                num_hidden_layers=2, num_attention_heads=2, use_cache=False,
                attention_dropout=0.1,
            )
        )  # fmt: skip
        if own:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        return made

    def losses(tier: str, check: Any, own: bool = False) -> list[float]:
        model = seeded(lambda: build(own))
        values = []
        blocks = {"blocks": ["LlamaDecoderLayer"]}  # small as they are
        with offload.initialize(model, keys(folder, tier, check, NVME, groups=blocks)) as e:
            model.train()
            torch.manual_seed(5)
            for step in range(2):
                tokens = tokens_of(step)
                loss = model(input_ids=tokens, labels=tokens).loss
                values.append(train_step(e.optimizer, loss))
            assert_nothing_left(e)
        return values

    expected = losses("device", False)
    assert losses("nvme", "selective") == expected
    assert losses("nvme", True) == expected
    assert losses("nvme", True, own=True) == expected


def test_a_disk_budget_that_is_used_up_leaves_the_rest_in_memory(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tight(keys(folder, "nvme"))
    settings["budget"]["nvme"] = "64KiB"
    with caplog.at_level(logging.WARNING):
        run = train(settings)
    run.assert_same(reference(folder))
    assert run.moved["activations stayed"] > 0
    assert said(caplog, "stay in device memory: nvme tier full") == 1


def test_a_disk_budget_without_anything_left_is_refused(folder: Path) -> None:
    settings = keys(folder, "nvme")
    settings["budget"]["nvme"] = 0
    with pytest.raises(BudgetError, match=r"placement.activations.tier: nvme.*raise budget.nvme"):
        offload.initialize(seeded(Model), settings)


# ------------------------------------------------------------------------------ memory
@functools.cache
def measured(tier: str, check: Any, folder: Path) -> Any:
    keys = {
        "budget": {"host": "256MiB", "nvme": "4GiB"}, "nvme": {"paths": [str(folder)]},
        "placement": {**HOST, "activations": {"tier": tier, "checkpoint": check}},
        "train": {"model": {"layers": 6, "hidden": 256, "heads": 4, "max_sequence": 512}},
    }  # fmt: skip
    return said_by(PROGRAM, json.dumps(keys), "8", "512")


@pytest.mark.slow
def test_activations_on_nvme_leave_memory(folder: Path, long: bool) -> None:
    if not long:
        pytest.skip("a quarter of a minute: with --long")
    there, away = measured("device", False, folder), measured("nvme", False, folder)
    assert away["loss"] == there["loss"]
    assert away["parked"] > 400 * MIB
    assert away["stayed"] == 0
    assert away["ledger_peak"] <= away["budget"]
    # the window remains, and what is freed but not yet given back to the system
    assert there["peak"] - away["peak"] > away["parked"] - 272 * MIB
