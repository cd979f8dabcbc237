"""What models do besides calling their modules once in order: each rule, one test.

Most compare with plain PyTorch: gradients of the first step bit for bit, the weights after a few
steps to rounding. Parameters, gradients and optimizer states are on nvme unless a test says
otherwise.
"""

from __future__ import annotations

import copy
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import CheckpointError, StateError, UnsupportedError
from offload.swap.transfer import Transfer
from tests.aio import IO_BACKENDS
from tests.offload.engine_cases import (
    DEVICE,
    HOST,
    NVME,
    WIDTH,
    Block,
    TinyLM,
    assert_same_bits,
    batches,
    bits,
    config,
    differing,
    gradients_of,
    losses_of,
    parameters_of,
    seeded,
    states_of,
)

LR, DECAY = 1e-2, 0.1
Loss = Callable[[Any, Tensor], Tensor]
Build = Callable[[], nn.Module]
MakeEngine = Callable[..., offload.Engine]
PLACEMENTS = {"nvme": NVME, "host": HOST, "device": DEVICE}
EVERYWHERE = [pytest.param(placement, id=name) for name, placement in PLACEMENTS.items()]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeEngine]:
    """Makes engines with swap files in a folder of the test; closes them in the end."""
    engines: list[offload.Engine] = []

    def make_engine(model: nn.Module, placement: Any = NVME, **keys: Any) -> offload.Engine:
        keys = {"optimizer": {"lr": LR, "weight_decay": DECAY, "chunk": 2048}, **keys}
        parameters, weights = keys.pop("parameters", None), keys.pop("weights", None)
        settings = config(tmp_path, placement, **keys)
        engine = offload.initialize(model, settings, parameters=parameters, weights=weights)
        engines.append(engine)
        return engine

    yield make_engine
    for engine in engines:
        engine.close()


def plain_optimizer(model: nn.Module) -> torch.optim.AdamW:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=LR, weight_decay=DECAY)


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained_plainly(
    build: Build, loss_of: Loss, data: list[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the first batch, then parameters and buffers after a step for each."""
    model = seeded(build)
    optimizer = plain_optimizer(model)
    gradients: dict[str, Tensor] = {}
    for number, batch in enumerate(data):
        loss_of(model, batch).backward()
        if number == 0:
            named = model.named_parameters()
            gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, dict(model.named_parameters()), dict(model.named_buffers())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name].detach(), rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def check(
    make: MakeEngine,
    build: Build,
    loss_of: Loss,
    data: list[Tensor],
    placement: Any = NVME,
    **keys: Any,
) -> offload.Engine:
    """Train with and without the engine and compare."""
    gradients, expected, buffers = trained_plainly(build, loss_of, data)
    engine = make(seeded(build), placement, **keys)
    for number, batch in enumerate(data):
        loss_of(engine.module, batch).backward()
        if number == 0:
            assert_same_bits(gradients_of(engine), gradients)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert_close(parameters_of(engine), expected)
    assert_close(dict(engine.module.named_buffers()), buffers)
    engine.check_integrity()
    return engine


def tokens_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model.loss(tokens)
    return loss


def square_loss(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def floats(count: int = 3, *shape: int) -> list[Tensor]:
    return [noise(*(shape or (4, WIDTH)), seed=seed) for seed in range(count)]


# ----------------------------------------------------------------------- parameters
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_tied_weights_are_one_parameter_with_the_sum_of_both_gradients(
    make: MakeEngine, placement: Any
) -> None:
    engine = check(make, TinyLM, tokens_loss, batches(3), placement)
    model: Any = engine.module
    assert model.head.weight is model.embed.weight
    saved = model.state_dict()
    assert bits(saved["head.weight"]) == bits(saved["embed.weight"])


def test_a_frozen_parameter_stays_as_it_is_and_has_no_optimizer_state(make: MakeEngine) -> None:
    before = {n: p.clone() for n, p in seeded(TinyLM).named_parameters() if not p.requires_grad}
    engine = check(make, TinyLM, tokens_loss, batches(3))
    after = parameters_of(engine)
    assert before
    assert_same_bits({name: after[name] for name in before}, before)
    states = engine.optimizer.state_dict()["state"]
    assert len(states) == sum(p.requires_grad for p in engine.module.parameters())


def test_requiring_a_gradient_of_a_frozen_parameter_later_is_an_error_that_names_it(
    make: MakeEngine,
) -> None:
    engine = make(seeded(TinyLM))
    model: Any = engine.module
    model.blocks[1].gain.requires_grad_()
    tokens_loss(model, batches(1)[0]).backward()
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.gain was frozen"):
        engine.optimizer.step()


def test_freezing_a_parameter_later_stops_its_updates_as_in_torch(make: MakeEngine) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    engine = check(make, build, square_loss, floats())
    model: Any = engine.module
    model[0].weight.requires_grad_(False)
    before = parameters_of(engine)
    square_loss(model, noise(4, WIDTH)).backward()
    engine.optimizer.step()
    assert set(differing(before, parameters_of(engine))) == {"0.bias", "2.weight", "2.bias"}


class TwoWays(nn.Module):
    """Uses `left` or `right`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.way = "left"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, self.way)(x)
        return y


def test_a_parameter_without_gradient_is_skipped_not_decayed_and_not_counted(
    make: MakeEngine,
) -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        model.way = "right" if x[0, 0] > 0 else "left"
        return square_loss(model, x)

    data = [x.clone() for x in floats(5)]
    for x, sign in zip(data, (-1, -1, 1, -1, 1), strict=True):
        x[0, 0] = sign
    engine = check(make, TwoWays, loss_of, data)
    model: Any = engine.module
    assert engine.values.read_state(model.left.weight)["step"] == 3
    assert engine.values.read_state(model.right.bias)["step"] == 2


def test_a_parameter_that_never_has_a_gradient_keeps_its_bits(make: MakeEngine) -> None:
    engine = make(seeded(TwoWays))
    before = parameters_of(engine)
    losses_of(engine, floats(3), loss_of=square_loss)
    assert set(differing(before, parameters_of(engine))) == {"left.weight", "left.bias"}
    assert engine.values.read_state(engine.module.right.weight) == {}


def test_buffers_follow_as_without_the_engine(make: MakeEngine) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
        )  # fmt: skip

    engine = check(make, build, square_loss, floats(4))
    model: Any = engine.module
    assert model[1].num_batches_tracked == 4
    assert model[1].running_mean.abs().sum() > 0


# ----------------------------------------------------------------------- ways to use modules
class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        y: Tensor = self.out(self.out.weight[:1] * x)
        return y


def test_a_module_used_twice_in_a_forward_gets_both_gradients(make: MakeEngine) -> None:
    check(make, Twice, square_loss, floats())


class Borrowing(nn.Module):
    """Uses its embedding's weight as a head, outside the embedding's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2100, WIDTH)  # large enough for a group of its own
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.embed(tokens))
        return nn.functional.linear(x, self.embed.weight)


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_a_parameter_used_outside_its_modules_forward_is_gathered(
    make: MakeEngine, placement: Any
) -> None:
    check(make, Borrowing, square_loss, batches(3), placement)


class WideAttention(nn.Module):
    """Reads `out_proj.weight` without calling `out_proj`; too large to be one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(160, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x)[0]
        return y


def test_multihead_attention_reads_its_projection_without_calling_it(make: MakeEngine) -> None:
    data = floats(1, 2, 3, 160)  # one step: its key bias has no gradient but rounding
    engine = check(make, WideAttention, square_loss, data)
    assert len(engine.runtime.groups) > 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_keep_their_own_list_of_weights(make: MakeEngine, kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = kind(WIDTH, 8, num_layers=2, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x)[0]
            return y

    check(make, Recurrent, square_loss, floats(3, 3, 2, WIDTH))


class ReturnsItsParameter(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6, WIDTH))
        self.whole = whole

    def forward(self, length: int) -> Tensor:
        return self.position if self.whole else self.position[:length]


class UsesReturned(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.position = ReturnsItsParameter(whole)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        position = self.position(len(x))[: len(x)]
        hidden = self.first(x)
        y: Tensor = self.last(hidden + self.first(position)) * self.scale
        return y


@pytest.mark.parametrize("whole", [False, True], ids=["a view", "all of it"])
def test_a_module_may_return_its_parameter(make: MakeEngine, whole: bool) -> None:
    check(make, lambda: UsesReturned(whole), square_loss, floats())


def test_a_returned_view_keeps_its_values_while_other_groups_come_and_go(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    view = ReturnsItsParameter(False)
    engine2 = make(seeded(lambda: view))
    expected = parameters_of(engine2)["position"][:3]
    found = view(3)
    losses_of(engine, batches(2))
    assert bits(found) == bits(expected)


@pytest.mark.parametrize("optimizer", ["host", "nvme"])
def test_between_steps_a_parameter_in_ram_never_shows_half_an_update(
    make: MakeEngine, optimizer: str
) -> None:
    model = seeded(TinyLM)
    with make(model, {**HOST, "optimizer": optimizer}) as engine:
        model.loss(batches(1)[0]).backward()
        engine.optimizer.step()
        weight = model.embed.weight.detach().clone()
        final = engine.values.full(model.embed.weight)
        assert_same_bits({"weight": weight}, {"weight": final})
        model.loss(batches(1)[0])
        assert_same_bits({"weight": model.embed.weight.detach()}, {"weight": final})


def test_a_parameter_in_no_param_group_is_left_alone_as_in_torch(make: MakeEngine) -> None:
    model = seeded(TinyLM)
    before = model.blocks[0].mlp[0].weight.detach().clone()
    others = [p for p in model.parameters() if p is not model.blocks[0].mlp[0].weight]
    engine = make(model, parameters=[p for p in others if p.requires_grad])
    model.loss(batches(1)[0]).backward()
    engine.optimizer.step()
    after = engine.values.full(model.blocks[0].mlp[0].weight)
    assert_same_bits({"weight": before}, {"weight": after})


def test_a_released_parameter_reads_as_what_it_is(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    losses_of(engine, batches(1))
    model: Any = engine.module
    outside = model.norm.weight.detach().clone()
    with engine.gathered(model.norm.weight):
        assert torch.equal(outside, model.norm.weight)


# ----------------------------------------------------------------------- checkpointing
class Checkpointed(TinyLM):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(blocks=3)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_checkpointed_blocks_train_as_plain_ones(
    make: MakeEngine, placement: Any, use_reentrant: bool
) -> None:
    check(make, lambda: Checkpointed(use_reentrant), tokens_loss, batches(3), placement)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_around_the_whole_model_trains_as_without(
    make: MakeEngine, use_reentrant: bool
) -> None:
    def loss_of(model: Any, tokens: Tensor) -> Tensor:
        start = torch.zeros((), requires_grad=True)  # reentrant: some input must require one

        def run(tokens: Tensor, start: Tensor) -> Tensor:
            return tokens_loss(model, tokens) + start

        loss: Tensor = checkpoint(run, tokens, start, use_reentrant=use_reentrant)
        return loss

    check(make, TinyLM, loss_of, batches(3))


def test_save_on_cpu_around_the_model_still_sees_its_activations(make: MakeEngine) -> None:
    def loss_of(model: Any, tokens: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return tokens_loss(model, tokens)

    check(make, TinyLM, loss_of, batches(2))


# ----------------------------------------------------------------------- backward and step
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_several_backward_passes_add_up_in_fp32(make: MakeEngine, precision: str) -> None:
    """Also unannounced, with gradient_accumulation_steps left at 1."""
    data = batches(3)
    alone: dict[str, Tensor] = {}
    for tokens in data:
        engine = make(seeded(TinyLM), precision=precision)
        tokens_loss(engine.module, tokens).backward()
        for name, gradient in gradients_of(engine).items():
            alone[name] = alone[name] + gradient.float() if name in alone else gradient.float()
        engine.close()

    engine = make(seeded(TinyLM), precision=precision)
    for tokens in data:
        tokens_loss(engine.module, tokens).backward()
    together = gradients_of(engine)

    assert {gradient.dtype for gradient in together.values()} == {torch.float32}
    assert_same_bits(together, alone)


def test_losses_of_two_forwards_may_go_back_in_any_order(make: MakeEngine) -> None:
    first, second = batches(2)

    def loss_of(model: Any, _: Tensor) -> Tensor:
        a, b = tokens_loss(model, first), tokens_loss(model, second)
        a.backward(retain_graph=True)
        return b

    check(make, TinyLM, loss_of, batches(2))


def test_evaluation_without_gradients_does_not_change_the_trajectory(make: MakeEngine) -> None:
    plain = make(seeded(TinyLM))
    expected = losses_of(plain, batches(4))
    engine = make(seeded(TinyLM))
    losses = []
    for number, tokens in enumerate(batches(4)):
        losses += losses_of(engine, [tokens])
        engine.module.eval()
        context = torch.inference_mode() if number % 2 else torch.no_grad()
        with context:
            for other in batches(2, seed=9):
                assert tokens_loss(engine.module, other).isfinite()
        engine.module.train()
    assert losses == expected
    assert_same_bits(states_of(engine), states_of(plain))


def test_gradients_kept_over_a_step_are_added_to_as_in_torch(make: MakeEngine) -> None:
    data = batches(4)
    model = seeded(TinyLM)
    optimizer = plain_optimizer(model)
    engine = make(seeded(TinyLM))
    for tokens in data:
        tokens_loss(model, tokens).backward()
        optimizer.step()  # no zero_grad
        tokens_loss(engine.module, tokens).backward()
        engine.optimizer.step()
    assert_close(parameters_of(engine), dict(model.named_parameters()))


@pytest.mark.parametrize("round_number", range(3))
def test_two_steps_in_a_row_use_the_same_gradients_twice_as_in_torch(
    make: MakeEngine, round_number: int
) -> None:
    model = seeded(TinyLM, round_number)
    optimizer = plain_optimizer(model)
    engine = make(seeded(TinyLM, round_number))
    for tokens in batches(3):
        for trained, each in ((model, optimizer), (engine.module, engine.optimizer)):
            tokens_loss(trained, tokens).backward()
            each.step()
            each.step()
            each.zero_grad()
    assert_close(parameters_of(engine), dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("precision", "skip", "skipped"),
    [("fp16", "auto", True), ("fp32", True, True), ("fp32", "auto", False)],
)
def test_a_non_finite_gradient_skips_the_step_or_not_and_is_said_once(
    make: MakeEngine, caplog: pytest.LogCaptureFixture, precision: str, skip: Any, skipped: bool
) -> None:
    model = nn.Linear(4, 4)
    engine = make(model, precision=precision, skip_nonfinite=skip)
    before = engine.values.full(model.weight)
    scale = engine.report().loss_scale
    dtype = before.dtype
    for _ in range(2):
        engine.backward(model(torch.ones(1, 4, dtype=dtype)).sum() * float("inf"))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    after = engine.values.full(model.weight)
    assert engine.report().skipped_steps == (2 if skipped else 0)
    assert torch.equal(before, after) is skipped
    assert bool(after.isfinite().all()) is skipped
    if scale is not None:
        assert engine.report().loss_scale == scale / 4
    said = [r.message for r in caplog.records if "gradient norm is not finite" in r.message]
    assert len(said) == 1
    assert ("skipped" if skipped else "applied") in said[0]


def test_a_step_without_gradients_changes_nothing(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    losses_of(engine, batches(1))
    before = states_of(engine)
    engine.optimizer.step()
    assert_same_bits(states_of(engine), before)


def test_zero_grad_before_the_step_drops_the_gradients(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    before = parameters_of(engine)
    tokens_loss(engine.module, batches(1)[0]).backward()
    engine.optimizer.zero_grad()
    engine.optimizer.step()
    assert gradients_of(engine) == {}
    assert_same_bits(parameters_of(engine), before)


def test_backward_of_a_graph_older_than_a_step_is_an_error(make: MakeEngine) -> None:
    for placement in (NVME, HOST):
        engine = make(seeded(TinyLM), placement)
        old = tokens_loss(engine.module, batches(1)[0])
        losses_of(engine, batches(1))
        with pytest.raises(StateError, match=r"run backward before optimizer\.step"):
            old.backward()


def test_a_changed_activation_is_an_error_in_backward_as_in_torch(make: MakeEngine) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()  # exp keeps its result for backward
            y.add_(1)
            return y

    engine = make(seeded(Changes))
    loss = square_loss(engine.module, noise(2, WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_penalty_differentiates_twice(make: MakeEngine) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def loss_of(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out.square() + (slope.norm(dim=1) - 1).square().mean()

    check(make, build, loss_of, floats())


def test_autograd_grad_returns_gradients_and_accumulates_none(make: MakeEngine) -> None:
    model = seeded(TinyLM)
    tokens = batches(1)[0]
    trainable = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(tokens_loss(model, tokens), trainable)
    engine = make(seeded(TinyLM))
    trainable = [p for p in engine.module.parameters() if p.requires_grad]
    found = torch.autograd.grad(tokens_loss(engine.module, tokens), trainable)
    assert [bits(g) for g in found] == [bits(g) for g in expected]
    assert gradients_of(engine) == {}


def test_sparse_embedding_gradients_count_as_dense_ones(make: MakeEngine) -> None:
    def train(sparse: bool) -> dict[str, Tensor]:
        engine = make(seeded(lambda: nn.Embedding(50, WIDTH, sparse=sparse)))
        losses_of(engine, batches(3), loss_of=square_loss)
        return states_of(engine)

    assert_same_bits(train(True), train(False))


@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_changed_in_its_forward_keeps_the_change(
    make: MakeEngine, placement: Any, precision: str
) -> None:
    """`max_norm` writes into the weight during the forward."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 2))

    tokens = batches(1)[0]
    if precision == "fp32":
        check(make, build, square_loss, batches(4), placement)
    engine = make(seeded(build), placement, precision=precision)
    with torch.no_grad():
        engine.module(tokens)
    model: Any = engine.module
    with engine.gathered():
        norms = model[0].weight[tokens.flatten()].float().norm(dim=1)
        assert model[0].weight.float().norm(dim=1).max() > 2
    assert norms.max() <= 1.01
    master = engine.values.read(model[0].weight, "master")
    assert bits(master.to(model[0].weight.dtype)) == bits(parameters_of(engine)["0.weight"])


# ----------------------------------------------------------------------- errors on the way
class Failing(TinyLM):
    fail = ""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.fail == "backward":
            logits.register_hook(_raise)
        if self.fail == "forward":
            raise RuntimeError("on purpose")
        return logits


def _raise(_: Any) -> None:
    raise RuntimeError("on purpose")


def failing_block(*_: Any) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("where", ["forward", "block", "backward", "loss"])
def test_training_goes_on_after_an_exception_as_if_it_had_not_been(
    make: MakeEngine, where: str
) -> None:
    plain = make(seeded(Failing))
    expected = losses_of(plain, batches(4))
    engine = make(seeded(Failing))
    model: Any = engine.module
    losses = losses_of(engine, batches(4)[:2])
    model.fail = where
    hook = model.blocks[1].mlp.register_forward_hook(failing_block) if where == "block" else None

    def fails() -> None:
        loss = tokens_loss(model, batches(1)[0])
        loss = loss if where != "loss" else _Raising.apply(loss)
        loss.backward()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="on purpose"):
            fails()
    if hook is not None:
        hook.remove()
    model.fail = ""
    engine.optimizer.zero_grad()
    losses += losses_of(engine, batches(4)[2:])

    assert losses == expected
    assert_same_bits(states_of(engine), states_of(plain))
    engine.check_integrity()
    report = engine.report().tiers
    assert all(tier.peak_nbytes <= tier.budget_nbytes for tier in report.values())
    held = engine.report().tiers["host"].used_nbytes
    assert held <= plain.report().tiers["host"].budget_nbytes
    assert all(group.residing.value == "released" for group in engine.runtime.groups)


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("on purpose")


# ----------------------------------------------------------------------- state dicts, gathered
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_state_dict_is_a_copy_and_loading_it_goes_back_there(
    make: MakeEngine, precision: str
) -> None:
    engine = make(seeded(TinyLM), precision=precision)
    losses_of(engine, batches(2))
    saved_model = engine.module.state_dict()
    saved_optimizer = engine.optimizer.state_dict()
    kept = {name: value.clone() for name, value in saved_model.items()}
    masters = {i: s["exp_avg"].clone() for i, s in saved_optimizer["state"].items()}
    expected = losses_of(engine, batches(3, seed=5))
    after = states_of(engine)

    assert_same_bits(saved_model, kept)
    assert all(bits(s["exp_avg"]) == bits(masters[i]) for i, s in saved_optimizer["state"].items())
    engine.module.load_state_dict(saved_model)
    engine.optimizer.load_state_dict(saved_optimizer)
    if precision == "fp16":
        return  # the loss scale is no part of either
    assert losses_of(engine, batches(3, seed=5)) == expected
    assert_same_bits(states_of(engine), after)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dicts_continue_a_run_in_another_engine_bit_for_bit(
    make: MakeEngine, precision: str
) -> None:
    first = make(seeded(TinyLM), HOST, precision=precision)
    losses_of(first, batches(3))
    second = make(seeded(TinyLM, seed=8), NVME, precision=precision)
    losses_of(second, batches(1, seed=7))
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert losses_of(second, batches(3, seed=5)) == losses_of(first, batches(3, seed=5))
    assert_same_bits(states_of(second), states_of(first))


def test_loading_an_optimizer_state_replaces_all_of_it(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    fresh = engine.optimizer.state_dict()
    values = {name: value.clone() for name, value in engine.module.state_dict().items()}
    expected = losses_of(engine, batches(3))
    engine.module.load_state_dict(values)
    engine.optimizer.load_state_dict(fresh)
    assert engine.optimizer.state_dict()["state"] == {}
    assert losses_of(engine, batches(3)) == expected


def test_loading_a_state_dict_with_missing_or_wrong_entries_fails_as_in_torch(
    make: MakeEngine,
) -> None:
    engine = make(seeded(TinyLM))
    saved = engine.module.state_dict()
    del saved["norm.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.weight"):
        engine.module.load_state_dict(saved)
    saved["norm.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
        engine.module.load_state_dict(saved)
    assert losses_of(engine, batches(1))[0] > 0
    assert all(group.residing.value == "released" for group in engine.runtime.groups)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_what_is_written_in_gathered_stays_and_becomes_the_master(
    make: MakeEngine, placement: Any, precision: str
) -> None:
    engine = make(seeded(TinyLM), placement, precision=precision)
    losses_of(engine, batches(2))
    model: Any = engine.module
    before = parameters_of(engine)
    with engine.gathered(model.norm), torch.no_grad():
        model.norm.weight.fill_(1.5)
    after = parameters_of(engine)
    assert differing(before, after) == ["norm.weight"]
    assert (after["norm.weight"] == 1.5).all()
    assert (engine.values.read(model.norm.weight, "master") == 1.5).all()


# ----------------------------------------------------------------------- the optimizer's interface
def test_one_cycle_schedules_lr_and_beta_as_with_torch(make: MakeEngine) -> None:
    model = seeded(TinyLM)
    optimizer: torch.optim.Optimizer = plain_optimizer(model)
    engine = make(seeded(TinyLM))
    for trained, each in ((model, optimizer), (engine.module, engine.optimizer)):
        schedule = torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.02, total_steps=6)
        for tokens in batches(6):
            tokens_loss(trained, tokens).backward()
            each.step()
            each.zero_grad()
            schedule.step() if schedule.last_epoch < 5 else None
    assert_close(parameters_of(engine), dict(model.named_parameters()), atol=1e-5)


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    expected = make(seeded(TinyLM))
    losses = []
    for tokens in batches(3):

        def closure(tokens: Tensor = tokens) -> Tensor:
            engine.optimizer.zero_grad()
            loss = tokens_loss(engine.module, tokens)
            loss.backward()
            return loss

        losses.append(engine.optimizer.step(closure).item())
    assert losses == losses_of(expected, batches(3))
    assert_same_bits(states_of(engine), states_of(expected))


# ----------------------------------------------------------------------- meta models and files
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_meta_model_has_the_same_values_wherever_it_is_placed(
    make: MakeEngine, precision: str
) -> None:
    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(37, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.norm = nn.BatchNorm1d(WIDTH) if precision == "fp32" else nn.LayerNorm(WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens).mean(1)
            for layer in self.layers:
                x = layer(x).relu()
            y: Tensor = self.norm(x)
            return y

    found = []
    for placement in (NVME, HOST, DEVICE, {**NVME, "parameters": {"host": "50%", "nvme": "50%"}}):
        with torch.device("meta"):
            model = Meta()
        engine = make(model, placement, precision=precision, seed=11)
        losses_of(engine, batches(2), loss_of=lambda m, x: m(x).float().square().mean())
        found.append(states_of(engine))
        assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    for other in found[1:]:
        assert_same_bits(other, found[0])
    assert found[0]["layers.0.weight"].abs().sum() > 0


def test_weights_from_a_safetensors_file_are_what_the_model_starts_with(
    make: MakeEngine, tmp_path: Path
) -> None:
    source = seeded(TinyLM, seed=4)
    values = {n: p.detach().clone() for n, p in source.named_parameters()}
    save_file(values, tmp_path / "model.safetensors")
    engine = make(seeded(TinyLM), weights=tmp_path / "model.safetensors")
    assert_same_bits(parameters_of(engine), values)


def test_weights_that_miss_a_parameter_are_an_error_that_names_it(
    make: MakeEngine, tmp_path: Path
) -> None:
    values = {n: p.detach().clone() for n, p in seeded(TinyLM).named_parameters()}
    del values["norm.bias"]
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.bias"):
        make(seeded(TinyLM), weights=tmp_path)


# ----------------------------------------------------------------------- the end
def test_use_after_close_is_an_error(make: MakeEngine) -> None:
    for placement in (NVME, HOST):
        engine = make(seeded(TinyLM), placement)
        losses_of(engine, batches(1))
        optimizer = engine.optimizer
        engine.close()
        engine.close()
        with pytest.raises(StateError, match="closed"), engine.gathered():
            pass
        for call in (
            optimizer.step, optimizer.zero_grad, optimizer.state_dict, engine.report, engine.settle,
            engine.module.state_dict, lambda e=engine: tokens_loss(e.module, batches(1)[0]),
        ):  # fmt: skip
            with pytest.raises(StateError, match="closed"):
                call()


def test_a_closed_engines_model_goes_on_with_weights_and_a_checkpoint(
    make: MakeEngine, tmp_path: Path
) -> None:
    expected = make(seeded(TinyLM))
    losses = losses_of(expected, batches(4))
    for placement, precision in ((NVME, "fp32"), (HOST, "fp32"), (DEVICE, "bf16")):
        model = seeded(TinyLM)
        params = dict(model.named_parameters())
        engine = make(model, placement)
        found = losses_of(engine, batches(4)[:2])
        engine.save_checkpoint(tmp_path / "checkpoint")
        engine.close()
        with pytest.raises(StateError, match="weights="):
            make(model, placement)
        with pytest.raises(StateError, match="engine is closed"):  # the refusal changed nothing
            tokens_loss(model, batches(1)[0])
        weights = tmp_path / "checkpoint"
        again = make(model, placement, weights=weights, precision=precision)
        assert {n: id(p) for n, p in model.named_parameters()} == {
            n: id(p) for n, p in params.items()
        }
        if precision == "fp32":
            again.load_checkpoint(tmp_path / "checkpoint")
            found += losses_of(again, batches(4)[2:])
            assert found == losses
            assert_same_bits(states_of(again), states_of(expected))
            assert_same_bits(model.state_dict(), expected.module.state_dict())
        again.close()


def test_a_closed_engines_model_that_gets_no_values_stays_without(
    make: MakeEngine, tmp_path: Path
) -> None:
    model = seeded(TinyLM)
    make(model).close()
    save_file({"nothing": torch.ones(1)}, tmp_path / "model.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no tensor"):
            make(model, weights=tmp_path / "model.safetensors")
        with pytest.raises(StateError, match="engine is closed"):
            tokens_loss(model, batches(1)[0])
        with pytest.raises(StateError, match="engine is closed"):
            model.state_dict()


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_two_open_engines_cannot_have_one_parameter(make: MakeEngine, placement: Any) -> None:
    def build() -> Any:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    model: Any = seeded(build)
    other: Any = seeded(build)
    model[1].bias.requires_grad_(False)
    other[1].weight = model[0].weight
    frozen: Any = nn.Linear(WIDTH, WIDTH)
    frozen.bias = model[1].bias
    before = [p.detach().clone() for p in other.parameters()]
    engine = make(model, placement)
    alone: Any = seeded(build)
    alone[1].bias.requires_grad_(False)
    expected = losses_of(make(alone, placement), floats(3), loss_of=square_loss)
    for shared, name in (
        (model, r"0\.weight"), (model[0], "weight"), (nn.Sequential(model), r"0\.0\.weight"),
        (other, r"1\.weight"),
    ):  # fmt: skip
        with pytest.raises(StateError, match=rf"^{name} trains through another engine"):
            make(shared, placement)
    if placement is NVME:
        with pytest.raises(StateError, match=r"^bias trains through another engine"):
            make(frozen, placement)
    assert losses_of(engine, floats(3), loss_of=square_loss) == expected
    other[1].weight = nn.Parameter(before[2])
    assert losses_of(make(other, placement), floats(3), loss_of=square_loss)


def open_files() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return {link for link in links if "/fd" not in link.split(" ", 1)[1]}


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("offload")}


def wait_until_closed() -> None:
    """What closes a dropped engine is a thread of its own."""
    until = time.monotonic() + 30
    while (our_threads() or swap_files()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not our_threads()


def swap_files() -> list[str]:
    return [link for link in open_files() if link.endswith("(deleted)") and "/pytest" in link]


@pytest.mark.parametrize("backend", IO_BACKENDS)
def test_nothing_is_left_after_close(tmp_path: Path, backend: str) -> None:
    process = psutil.Process()
    keys = config(tmp_path, nvme={"paths": [str(tmp_path)], "backend": backend})
    with offload.initialize(seeded(TinyLM), keys) as engine:  # the first leaves torch's own threads
        losses_of(engine, batches(1))
    assert not our_threads()
    files, threads = open_files(), process.num_threads()
    for _ in range(3):
        with offload.initialize(seeded(TinyLM), keys) as engine:
            losses_of(engine, batches(1))
            assert our_threads()
    del engine
    gc.collect()
    assert open_files() == files
    assert process.num_threads() <= threads
    assert not our_threads()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_dropped_without_close_leaves_nothing_behind(tmp_path: Path) -> None:
    import torch.distributed.pipelining  # noqa: F401 - who has it is looked at for its schedules

    gc.collect()
    files = open_files()
    engine = offload.initialize(seeded(TinyLM), config(tmp_path))
    losses_of(engine, batches(2))
    del engine
    gc.collect()
    wait_until_closed()
    assert open_files() == files
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("thread", ["update", "io"])
def test_an_engine_that_is_collected_on_a_thread_of_its_own_is_closed(
    tmp_path: Path, thread: str
) -> None:
    gc.collect()
    engine = offload.initialize(seeded(TinyLM), config(tmp_path, groups={"blocks": ["Block"]}))
    losses_of(engine, batches(2))
    gone, store, updates = weakref.ref(engine), engine._homes.store, engine.runtime.updates
    assert store is not None
    collected: Transfer[None] = Transfer("the collection")

    def collect() -> None:
        gc.collect()  # what closes the engine may wait neither for this request nor for this update
        collected.complete(None)

    gc.disable()
    try:
        del engine
        page, path = memoryview(mmap.mmap(-1, 4096)), store.files[0]
        if thread == "io":
            store.backend.submit_read(path.fd, page, 0, path=path.path, after=collect)
        else:
            updates._worker._work = lambda: collect() is not None
            updates._worker.wake()
        collected.wait(30)
        assert gone() is None
        wait_until_closed()
    finally:
        gc.enable()


def test_a_model_whose_engine_was_dropped_says_so(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    offload.initialize(model, config(tmp_path))
    gc.collect()
    with pytest.raises(StateError, match=r"engine was dropped|engine is closed"):
        model(batches(1)[0])
    wait_until_closed()


def test_an_engine_that_is_dropped_amid_a_forward_stays_until_its_end(tmp_path: Path) -> None:
    model, tokens = seeded(TinyLM), batches(1)[0][:, :-1]
    with offload.initialize(seeded(TinyLM), config(tmp_path, groups={"blocks": ["Block"]})) as e:
        expected = e.module(tokens)
    kept = [offload.initialize(model, config(tmp_path, groups={"blocks": ["Block"]}))]

    def drop(*_: Any) -> None:
        kept.clear()
        gc.collect()

    model.blocks[0].register_forward_pre_hook(drop)
    assert torch.equal(model(tokens), expected)
    gc.collect()
    wait_until_closed()


def test_an_optimizer_keeps_the_engine_it_belongs_to(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    optimizer = offload.initialize(model, config(tmp_path)).optimizer
    gc.collect()
    for tokens in batches(2):
        tokens_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.state_dict()["state"]) > 0
    del optimizer, model
    gc.collect()
    wait_until_closed()


def test_two_engines_at_once_do_not_disturb_each_other(make: MakeEngine) -> None:
    alone = []
    for seed in (0, 1):
        engine = make(seeded(TinyLM, seed))
        losses_of(engine, batches(3, seed))
        alone.append(states_of(engine))
    first, second = make(seeded(TinyLM, 0)), make(seeded(TinyLM, 1))
    for a, b in zip(batches(3, 0), batches(3, 1), strict=True):
        losses = tokens_loss(first.module, a), tokens_loss(second.module, b)
        for loss in reversed(losses):
            loss.backward()
        for engine in (first, second):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    assert_same_bits(states_of(first), alone[0])
    assert_same_bits(states_of(second), alone[1])


# ----------------------------------------------------------------------- odd sizes, odd moments
class NoElements(nn.Module):
    """A parameter without elements, in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, WIDTH))
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x), nn.functional.linear(x, self.none)], dim=-1)


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_a_group_without_elements_trains_like_any_other(make: MakeEngine, placement: Any) -> None:
    check(make, NoElements, square_loss, floats(), placement)


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_inference_mode_gives_the_bits_of_no_grad_and_leaves_training_alone(
    make: MakeEngine, placement: Any
) -> None:
    engine = make(seeded(TinyLM), placement)
    losses_of(engine, batches(2))
    tokens = batches(1)[0][:, :-1]
    with torch.inference_mode():
        inferred = engine.module(tokens)
        assert not engine.module.embed.weight.is_inference()
    with torch.no_grad():
        assert torch.equal(inferred, engine.module(tokens))
    losses_of(engine, batches(1))


@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize("trainable", [False, None])
def test_a_model_without_anything_to_train_can_be_evaluated(
    make: MakeEngine, placement: Any, trainable: bool | None
) -> None:
    plain = nn.ReLU() if trainable is None else seeded(lambda: nn.Linear(WIDTH, 3))
    model = nn.ReLU() if trainable is None else seeded(lambda: nn.Linear(WIDTH, 3))
    engine = make(model.requires_grad_(False), placement)
    x = floats(1)[0]
    assert torch.equal(engine.module(x), plain(x))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.check_integrity()


def test_copying_a_model_with_an_engine_is_an_error_that_says_how_to(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    with pytest.raises(UnsupportedError, match=r"before offload\.initialize"):
        copy.deepcopy(engine.module)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("step", "; call engine.optimizer.step()"), ("train", "; call engine.module.train()"),
     ("misspelt", "")],
)  # fmt: skip
def test_what_an_engine_does_not_have_is_said_with_where_it_is(
    tmp_path: Path, name: str, hint: str
) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as engine:
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        assert str(caught.value) == f"'Engine' object has no attribute {name!r}{hint}"
