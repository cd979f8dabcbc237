"""`placement.activations.tiled_mlp`: MLPs in tiles of a sequence train as whole ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.config import OffloadConfig
from offload.config.training import ModelConfig
from offload.errors import ConfigError, OffloadError, UnsupportedError
from offload.gpt import GatedMlp, LanguageModel, build_meta_model
from offload.losses.tiled_mlp import tile_mlps
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.planner import plan_run
from offload.planning.choice.solver import RunFacts
from offload.planning.machine.baseline import known_baseline
from offload.planning.machine.speeds import NOMINAL
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Hardware
from offload.tiers.tier import Tier
from offload.zero.groups.parameter_grouping import group_parameters
from tests.offload.engine_cases import DEVICE, HOST, NVME, config, said_by, seeded
from tests.planning.real_pass import real_facts

SHAPE = ModelConfig(layers=3, hidden=64, heads=4, kv_heads=2, mlp=160, max_sequence=600)
TOKENS = torch.arange(1200).view(2, 600) * 7 % 251
WIDTH = 24
# Largest differences of the output and of gradients, by the largest element.
BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-6}


class Adapted(nn.Module):
    """A frozen matrix with an adapter, whose rows are dropped out, and a bias."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(self.dropout(x)))
        return result


class Twice(nn.Module):
    """One matrix under two names, and a gradient that is two parameters' at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).tanh()) + (self.a + self.b)
        return result


class Model(nn.Module):
    """One MLP, between a norm and a residual."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = build()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(self.norm(x))
        return result


KINDS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: GatedMlp(ModelConfig(hidden=WIDTH), 40),
    "biases": lambda: nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH)),
    "adapted": Adapted,
    "twice": Twice,
}


def results(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The output, and gradients for an upstream gradient that is not 1."""
    output = model(x)
    upstream = torch.linspace(-1, 2, output.numel(), dtype=x.dtype).view(output.shape)
    output.backward(upstream)
    leaves = [x, *model.parameters()]
    found = [output.detach(), *(each.grad for each in leaves)]
    for each in leaves:
        each.grad = None
    return found


def assert_close(ours: list[Tensor | None], theirs: list[Tensor | None], bound: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert (a - b).abs().max() <= bound * b.abs().max()


@pytest.mark.parametrize("seed", range(24))
def test_outputs_and_gradients_are_those_of_all_tokens_at_once(seed: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice(list(BOUNDS))
    shape = draw.choice([(31,), (2, 40), (1, 64), (3, 2, 11), (5, 1, 1, 9)])
    model = seeded(lambda: Model(KINDS[draw.choice(list(KINDS))])).to(dtype)
    torch.manual_seed(seed)
    x = torch.randn(WIDTH, *shape).to(dtype).movedim(0, -1)  # not contiguous
    x.requires_grad_(draw.random() < 0.8)
    if draw.random() < 0.3:
        model.norm.requires_grad_(False)
    expected = results(model, x)
    undo = tile_mlps(model, draw.choice([1, 7, 16, 30, 31, 1000]))
    assert_close(results(model, x), expected, BOUNDS[dtype])
    undo()
    assert_close(results(model, x), expected, 0)


def test_dropout_draws_tile_by_tile_and_the_same_in_backward() -> None:
    model = seeded(lambda: Model(lambda: Adapted(0.5)))
    x = torch.randn(2, 40, WIDTH, requires_grad=True)

    def whole(x: Tensor) -> Tensor:
        parts = model.norm(x).view(1, -1, WIDTH).split(16, 1)
        return x + torch.cat([model.mlp(part) for part in parts], 1).view(x.shape)

    seen = []
    for forward in (whole, model):
        undo = tile_mlps(model, 16 if forward is model else None)
        torch.manual_seed(1)
        output = forward(x)
        torch.rand(3)  # draws between forward and backward
        seen.append([output, *torch.autograd.grad(output.square().sum(), [x, model.mlp.up.weight])])
        seen[-1].append(torch.rand(5))  # generators go on from where they were
        undo()
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(seen[1][-1], seen[0][-1])


def test_autocast_is_that_of_the_forward_and_its_cache_stays_clean() -> None:
    model = seeded(lambda: Model(KINDS["gated"]))
    x = torch.randn(2, 40, WIDTH, requires_grad=True)
    seen = []
    for tile in (None, 16):
        undo = tile_mlps(model, tile)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x), model(x[:, :4])  # the second one as it is
        seen.append(torch.autograd.grad(sum(o.sum() for o in outputs), model.mlp.parameters()))
        undo()
    assert_close(list(seen[1]), list(seen[0]), 0.02)


# ---------------------------------------------------------------- in an engine
def trained(folder: Path, precision: str, placement: Any, **activations: Any) -> list[Tensor]:
    """Losses and weights of three steps of two passes."""
    model = seeded(lambda: LanguageModel(SHAPE))
    placement = {**placement, "activations": {"tiled_mlp": 100, **activations}}
    losses = []
    settings = config(folder, placement, precision=precision, clip_grad_norm=0.5)
    with offload.initialize(model, settings) as engine:
        for _ in range(3):
            for tokens in TOKENS:
                loss = model(tokens[None], tokens[None].roll(-1, 1)).loss
                loss.backward()
                losses.append(loss.detach())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return [*losses, *map(Tensor.clone, model.state_dict().values())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_are_the_same_wherever_states_and_activations_are(
    tmp_path: Path, precision: str
) -> None:
    expected = trained(tmp_path, precision, DEVICE)
    for placement in (HOST, NVME):
        for checkpoint in (False, True):
            for tier in ("device", "nvme"):
                run = trained(tmp_path, precision, placement, checkpoint=checkpoint, tier=tier)
                assert all(map(torch.equal, run, expected)), (placement, checkpoint, tier)
    plain = trained(tmp_path, precision, HOST, tiled_mlp=None)
    assert_close([*run[:6]], [*plain[:6]], 1e-5 if precision == "fp32" else 1e-2)
    assert not all(map(torch.equal, run, plain))


def test_frozen_weights_in_4_bits_with_adapters(tmp_path: Path) -> None:
    grads = []
    for tile in (None, 7):
        model = seeded(lambda: nn.Sequential(*(Model(Adapted) for _ in range(3))))
        placement = {**NVME, "activations": {"checkpoint": True, "tiled_mlp": tile}}
        stored = {"storage": {"weights": "nf4", "group_size": 32}, "groups": {"blocks": ["Model"]}}
        with offload.initialize(model, config(tmp_path, placement, **stored)) as engine:
            model(torch.linspace(-1, 1, 40 * WIDTH).view(1, 40, WIDTH)).square().sum().backward()
            grads.append([engine.gradient(p) for p in model.parameters() if p.requires_grad])
    assert_close(grads[1], grads[0], 2e-6)


# ---------------------------------------------------------------- what is refused
class Normed(nn.Module):
    def __init__(self, tracks: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=tracks)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x.flatten(0, -2)).view(x.shape)
        return result


class Returning(nn.Module):
    """Returns what a function makes of its output."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self.change(self.linear(x))


class Gated(nn.Module):
    """Adds the mean of all tokens by a gate that is still closed, and counts its calls."""

    def __init__(self, gates: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1)) if gates else 0.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1  # a new tensor, of the same version
        return x + self.gate * x.mean((0, 1)) if torch.is_tensor(self.gate) else x + self.calls


OTHER = nn.Parameter(torch.ones(WIDTH))
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "statistics": (lambda: Normed(True), "changes its buffers"),
    "statistics of a batch": (lambda: Normed(False), "of other tokens"),
    "a shift": (lambda: Returning(lambda y: y.roll(1, -2)), "of other tokens"),
    "a closed gate": (lambda: Gated(True), "of other tokens"),
    "calls": (lambda: Gated(False), "changes its buffers"),
    "a tuple": (lambda: Returning(lambda y: (y, None)), "something else than one tensor"),
    "another width": (lambda: Returning(lambda y: y[..., :3]), "something else than one tensor"),
    "a wider format": (lambda: Returning(Tensor.double), "float64 of torch.float32"),
    "another's parameter": (lambda: Returning(lambda y: y * OTHER), "no parameters of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_compute_every_token_alone_is_refused(case: str) -> None:
    build, why = REFUSED[case]
    model = Model(build)
    tile_mlps(model, 16)
    with pytest.raises(
        UnsupportedError, match=rf"tiled_mlp: mlp \({type(model.mlp).__name__}.*{why}"
    ):
        model(torch.randn(2, 40, WIDTH)).sum().backward()


def test_calls_hooks_and_second_derivatives_that_are_refused() -> None:
    model, x = Model(KINDS["biases"]), torch.randn(2, 40, WIDTH, requires_grad=True)
    tile_mlps(model, 16)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="other arguments than one tensor"):
        model.mlp(x, x)
    next(model.mlp.children()).register_forward_hook(lambda *given: None)
    with pytest.raises(UnsupportedError, match="hooks of other code on its 0"):
        model(x)
    assert model(x[:, :4]).shape == (2, 4, WIDTH)  # no more than a tile: as it is


def test_configurations_that_are_refused() -> None:
    experts = LanguageModel(ModelConfig(layers=2, hidden=32, heads=2, experts=4))
    for model, why in ((experts, "layers.0.mlp .* is of experts"), (nn.Linear(2, 2), "no module")):
        with pytest.raises(ConfigError, match=why):
            tile_mlps(model, 16)
    for wrong in ({"tiled_mlp": 0}, {"tiled_mlp": 16, "checkpoint": "selective"}):
        with pytest.raises(OffloadError, match="tiled_mlp"):
            OffloadConfig.load({"placement": {"activations": wrong}})


# ---------------------------------------------------------------- memory
def loaded(model: dict[str, Any], length: int, **activations: Any) -> OffloadConfig:
    """A configuration in bf16 with states on host and recomputation."""
    shape = {**model, "max_sequence": length}
    placement = {**HOST, "activations": {"checkpoint": True, **activations}}
    keys = {"precision": "bf16", "train": {"model": shape}, "placement": placement}
    return OffloadConfig.load(keys)


def facts(model: dict[str, Any], length: int, device: str, **activations: Any) -> ActivationFacts:
    """One pass."""
    config = loaded(model, length, **activations)
    return trace_activations(build_meta_model(config), config, Workload(1, length), device=device)


def test_128k_tokens_of_one_sequence_are_planned_for_8b_on_80_gb() -> None:
    """Block inputs wait on the host; without that, and without tiles, a pass takes 64 GB."""
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336}
    shape |= {"vocab": 128256, "tied": False}
    config = loaded(shape, 131072, tier="host", tiled_mlp=16384)
    model = build_meta_model(config)
    traced = trace_activations(model, config, Workload(1, 131072), device="cuda")
    assert traced.peak_elsewhere_nbytes < 15e9
    assert 2 * 131072 * 4096 * 32 < traced.saved_nbytes < 37e9
    gib = 1 << 30
    grouped = group_parameters(model, config.groups.blocks).shape()
    run = RunFacts(
        Workload(1, 131072), NOMINAL, lambda config: traced, known_baseline("bf16", gpu=True)
    )
    hardware = Hardware(80 * 10**9, 256 * gib, 254 * gib, gib)
    plan = plan_run(config, grouped, hardware, run)
    assert plan.fits
    gpu, ram = (plan.memory.places[tier] for tier in (Tier.DEVICE, Tier.HOST))
    assert gpu.peak_nbytes < 40e9
    assert ram.peak_nbytes < 160e9  # 112 of states, 37 of block inputs, libraries, pinning


def test_traces_count_what_a_pass_takes_and_computes() -> None:
    """Of the second computation the last product is not needed, but made."""
    shape: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "mlp": 1024, "vocab": 256}
    whole, tiled = (facts(shape, 640, "cpu", tiled_mlp=tile) for tile in (None, 64))
    model = seeded(lambda: LanguageModel(ModelConfig(**shape, max_sequence=640)))
    assert real_facts(model, loaded(shape, 640, tiled_mlp=64), Workload(1, 640)) == tiled
    assert tiled.forward.flops == whole.forward.flops
    assert tiled.backward.flops - whole.backward.flops == 3 * 2 * 640 * 64 * 1024
    assert whole.peak_nbytes - tiled.peak_nbytes > 4 * 2 * (640 - 64) * 1024


CHILD = """
import sys, torch
from offload.config.training import ModelConfig
from offload.gpt import LanguageModel
from offload.losses.tiled_mlp import tile_mlps
from offload.process import machine
length, tile = 2048, int(sys.argv[1])
model = LanguageModel(
    ModelConfig(layers=1, hidden=64, heads=2, mlp=16384, max_sequence=length),
    checkpoint_activations=True,
)
tile_mlps(model, tile or None)
tokens = torch.arange(length)[None] % 251
model(tokens[:, :64], tokens[:, :64]).loss.backward()
machine.trim_memory()
before = machine.rss_nbytes()
model(tokens, tokens).loss.backward()
print(machine.peak_rss_nbytes() - before)
"""


def test_a_long_sequence_in_a_process_of_its_own_takes_one_tile() -> None:
    wide = 4 * 2048 * 16384  # six tensors of this size without tiles, in fp32
    whole, tiled = said_by(CHILD, "0"), said_by(CHILD, "64")
    assert whole > 6 * wide
    assert tiled < whole / 3  # the rest are holes in freed memory


def test_copies_on_their_way_are_counted_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"layers": 3, "hidden": 256, "heads": 4, "mlp": 256, "vocab": 256}
    peaks = []
    for nbytes in (0, 1 << 30):  # one copy at a time, or all
        monkeypatch.setattr("offload.planning.activations.trace.DEVICE_NBYTES", nbytes)
        peaks.append(facts(shape, 2048, "cuda").peak_elsewhere_nbytes)
    assert peaks[1] - peaks[0] >= 2 * 2048 * 256  # the first block's input
