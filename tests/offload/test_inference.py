"""`offload.dispatch`: the model computes from the tiers what it computes in RAM, and owns them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
import offload.tiered_model
from offload.errors import BudgetError, StateError, UnsupportedError
from tests.offload.engine_cases import MARKS, ON, TinyLM, batches, config, seeded
from tests.offload.engine_states import bits

pytestmark = MARKS

MIXED = {"host": "50%", "nvme": "50%"}
PLACEMENTS: list[Any] = ["host", "nvme", MIXED]
BLOCKS = 4


def build() -> Any:
    return seeded(lambda: TinyLM(BLOCKS)).to(ON)


def placed(folder: Path, parameters: Any = "nvme", **keys: Any) -> dict[str, Any]:
    return config(folder, {"parameters": parameters}, **keys)


def tokens() -> Tensor:
    return batches(1)[0][:, :-1]


@torch.no_grad()
def logits(model: nn.Module) -> bytes:
    return bits(model(tokens()))


@pytest.mark.parametrize("parameters", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_logits_are_those_in_ram_in_the_format_of_the_weights(
    tmp_path: Path, parameters: Any, precision: str, dtype: torch.dtype
) -> None:
    model = build().to(dtype)
    expected = logits(model)
    assert offload.dispatch(model, placed(tmp_path, parameters)) is model
    with offload.dispatched(model) as dispatched:
        assert dispatched.config.precision == precision
        assert [logits(model) for _ in range(3)] == [expected] * 3
        assert dispatched.report().tiers["host"].by_class.keys() <= {"parameters"}
        dispatched.check_integrity()


def test_a_model_of_files_is_never_made(tmp_path: Path) -> None:
    plain = build()
    save_file(
        {n: p.detach().cpu() for n, p in plain.named_parameters()}, tmp_path / "w.safetensors"
    )
    with torch.device("meta"):
        model = TinyLM(BLOCKS)
    offload.dispatch(model, placed(tmp_path), weights=tmp_path / "w.safetensors")
    with offload.dispatched(model):
        assert logits(model) == logits(plain)


def test_a_named_precision_casts(tmp_path: Path) -> None:
    model = build()
    expected = logits(copy.deepcopy(model).bfloat16())
    with offload.dispatched(offload.dispatch(model, placed(tmp_path, precision="bf16"))):
        assert logits(model) == expected


def test_parameters_that_other_code_exchanged_are_refused(tmp_path: Path) -> None:
    """As accelerate's hooks do, which build one of the same class."""
    model = build()
    with offload.dispatched(offload.dispatch(model, placed(tmp_path, device="cpu"))):
        linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
        linear._parameters["weight"] = type(linear.weight)(torch.zeros(linear.weight.shape), False)
        with pytest.raises(UnsupportedError, match="other code put it in its place"):
            logits(model)


class Mixed(nn.Module):
    """Most weights in bf16, and one that is kept in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).bfloat16()
        self.scale = nn.Parameter(torch.linspace(0.1, 0.9, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.bfloat16()).float() * self.scale
        return y


@pytest.mark.parametrize("from_files", [False, True])
def test_weights_in_other_formats_stay_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, from_files: bool
) -> None:
    plain, weights = seeded(Mixed), None
    x = torch.randn(2, 8)
    model = copy.deepcopy(plain)
    if from_files:
        weights = tmp_path / "w.safetensors"
        save_file({n: p.detach() for n, p in plain.named_parameters()}, weights)
        with torch.device("meta"):
            model = Mixed()
        with pytest.raises(UnsupportedError, match=r"scale is torch\.float32 on the meta"):
            offload.dispatch(model, placed(tmp_path, device="cpu"))
    offload.dispatch(model, placed(tmp_path, device="cpu"), weights=weights)
    assert "scale are not bf16 as most weights, and stay in RAM" in caplog.text
    with offload.dispatched(model), torch.no_grad():
        assert bits(model(x)) == bits(plain(x))
        assert model.scale.dtype is torch.float32


def test_models_made_in_inference_mode_or_in_another_format_are_refused(tmp_path: Path) -> None:
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="made in inference mode"):
        offload.dispatch(build(), placed(tmp_path))
    with pytest.raises(UnsupportedError, match=r"most weights are torch\.float64"):
        offload.dispatch(nn.Linear(4, 4).double(), placed(tmp_path))


def test_in_inference_mode_and_after_it(tmp_path: Path) -> None:
    model = build()
    expected = logits(model)
    with torch.inference_mode():
        offload.dispatch(model, placed(tmp_path))
    with offload.dispatched(model):
        with torch.inference_mode():
            assert bits(model(tokens())) == expected
        assert logits(model) == expected


def test_else_as_much_as_fits(tmp_path: Path) -> None:
    budget = {"host": "160KiB", "nvme": "64MiB"}
    keys = config(tmp_path, {}, budget=budget, device="cpu", prefetch=1)
    model = seeded(lambda: TinyLM(BLOCKS))
    with offload.dispatched(offload.dispatch(model, keys)) as dispatched:
        shares = dict(dispatched.plan.placements[offload.tiers.ledger.StateClass.PARAMETERS].shares)
        assert set(map(str, shares)) == {"host", "nvme"}
        plan, report = dispatched.plan, dispatched.report()
        assert report.tiers["host"].peak_nbytes <= plan.budgets[offload.tiers.tier.Tier.HOST]


def test_no_room_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    model = build()
    expected = logits(model)
    with pytest.raises(BudgetError, match=r"budget\.host"):
        offload.dispatch(model, placed(tmp_path, budget={"host": "64KiB", "nvme": "64MiB"}))
    assert logits(model) == expected


def test_a_dispatched_model_is_found_from_around_it(tmp_path: Path) -> None:
    model = offload.dispatch(build(), placed(tmp_path))
    around = nn.Sequential(model)
    with offload.dispatched(model) as dispatched:
        assert offload.dispatched(around) is dispatched
    with pytest.raises(StateError, match="TinyLM is not dispatched"):
        offload.dispatched(build())


def test_a_dispatched_or_trained_model_is_not_taken_over(tmp_path: Path) -> None:
    model = offload.dispatch(build(), placed(tmp_path))
    with offload.dispatched(model):
        for give in offload.dispatch, offload.initialize:
            with pytest.raises(StateError, match="is dispatched"):
                give(model, placed(tmp_path))
    with offload.initialize(seeded(TinyLM), config(tmp_path)) as engine:
        with pytest.raises(StateError, match="trains through another engine"):
            offload.dispatch(engine.module, placed(tmp_path))
        with pytest.raises(StateError, match="TinyLM is not dispatched"):
            offload.dispatched(engine.module)


def test_tiers_go_with_the_model(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    model = offload.dispatch(build(), placed(tmp_path))
    logits(model)
    gone = weakref.ref(offload.dispatched(model))
    assert len(os.listdir("/proc/self/fd")) > before
    del model
    gc.collect()
    assert gone() is None  # its threads end with the test (see conftest)


@pytest.mark.parametrize("name", ["Dispatched._load_group", "refuse_foreign_wrappers"])
def test_one_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: Any, name: str
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("offload.inference." + name, broken)
    with pytest.raises(RuntimeError, match="broken"):
        offload.dispatch(build(), placed(tmp_path))
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("parameters", PLACEMENTS, ids=str)
def test_prompts_outside_of_the_model_are_trained(tmp_path: Path, parameters: Any) -> None:
    def gradient(model: Any) -> Tensor:
        prompt = torch.full((1, 1, 32), 0.1, device=ON, requires_grad=True)
        x = model.embed(tokens()) + prompt
        for block in model.blocks:
            x = block(x)
        x.square().mean().backward()
        assert prompt.grad is not None
        return prompt.grad

    expected = gradient(build().requires_grad_(False))
    model = offload.dispatch(build().requires_grad_(False), placed(tmp_path, parameters))
    with offload.dispatched(model):
        assert bits(gradient(model)) == bits(expected)


@pytest.mark.parametrize("parameters", PLACEMENTS, ids=str)
def test_its_own_weights_are_not_trained(tmp_path: Path, parameters: Any) -> None:
    plain = build()
    model = offload.dispatch(build().requires_grad_(False), placed(tmp_path, parameters))
    with offload.dispatched(model):
        model.requires_grad_(True)
        for name in "first", "and later":
            output = model(tokens())
            assert bits(output) == bits(plain(tokens())), name
            with pytest.raises(UnsupportedError, match="weight got a gradient, and a dispatched"):
                output.sum().backward()
            assert not any(param.grad is not None for param in model.parameters())
        assert logits(model) == logits(plain)


@pytest.mark.parametrize("parameters", PLACEMENTS, ids=str)
def test_values_are_read_and_written(tmp_path: Path, parameters: Any) -> None:
    plain = build()
    model = offload.dispatch(build(), placed(tmp_path, parameters))
    with offload.dispatched(model) as dispatched:
        saved = model.state_dict()
        assert {n: bits(t) for n, t in saved.items()} == {
            n: bits(t) for n, t in plain.state_dict().items()
        }
        for each in model, plain:
            each.load_state_dict({name: tensor * 2 for name, tensor in saved.items()})
        assert logits(model) == logits(plain)
        with dispatched.gathered(model.norm.weight), torch.no_grad():
            model.norm.weight.zero_()
        with torch.no_grad():
            plain.norm.weight.zero_()
        assert logits(model) == logits(plain)


def test_it_is_not_pickled(tmp_path: Path) -> None:
    model = offload.dispatch(build(), placed(tmp_path))
    with offload.dispatched(model), pytest.raises(UnsupportedError, match="copied or pickled"):
        pickle.dumps(model)


def test_threads_take_turns(tmp_path: Path) -> None:
    """As a streamer does: `generate` runs in a second thread, and close comes from the first."""
    model = build()
    expected = logits(model)
    dispatched = offload.dispatched(offload.dispatch(model, placed(tmp_path)))
    inside, go_on, answers = threading.Event(), threading.Event(), []

    def hold(*args: Any) -> None:
        inside.set()
        assert go_on.wait(10)

    hook = model.blocks[1].register_forward_hook(hold)
    other = threading.Thread(target=lambda: answers.append(logits(model)))
    other.start()
    assert inside.wait(10)
    with pytest.raises(StateError, match="thread"):
        model(tokens())
    with pytest.raises(StateError, match="thread"):
        dispatched.close()
    go_on.set()
    other.join()
    hook.remove()
    assert answers == [expected]
    assert logits(model) == expected
    dispatched.close()


def test_several_models_side_by_side(tmp_path: Path) -> None:
    models = [seeded(TinyLM, seed).to(ON) for seed in range(3)]
    expected = [logits(model) for model in models]
    for model, parameters in zip(models, PLACEMENTS, strict=True):
        offload.dispatch(model, placed(tmp_path, parameters))
    for _ in range(2):
        assert [logits(model) for model in models] == expected
    for model in models:
        offload.dispatched(model).close()


def test_an_error_in_the_middle_of_a_pass_leaves_the_model_usable(tmp_path: Path) -> None:
    model = build()
    expected = logits(model)
    with offload.dispatched(offload.dispatch(model, placed(tmp_path))):

        def stop(*args: Any) -> None:
            raise KeyboardInterrupt

        hook = model.blocks[2].mlp.register_forward_hook(stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                logits(model)
        hook.remove()
        assert logits(model) == expected


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128, bias=False)  # 64 KiB

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("parameters", ["nvme", None], ids=["nvme", "auto"])
@pytest.mark.parametrize(("memory", "prefetch"), [(3, 1), (8, 0), (8, 1), (8, 2), (12, 4)])
def test_a_pass_reads_what_memory_does_not_hold(
    tmp_path: Path, parameters: Any, memory: int, prefetch: int
) -> None:
    """Of passes that use all groups in one order, the best that can be done (Belady): what was used
    last makes room for what comes, and the rest stays."""
    group = 64 << 10
    placement = {} if parameters is None else {"parameters": parameters}
    budget = {"host": memory * group, "nvme": "64MiB"}
    keys = config(tmp_path, placement, budget=budget, prefetch=prefetch, device="cpu")
    model, passes = seeded(Chain), 8
    with offload.dispatched(offload.dispatch(model, keys)) as dispatched, torch.no_grad():
        for _ in range(2):  # the order is learnt
            model(torch.ones(1, 128))
        before = dispatched.report().bytes_moved["nvme read"]
        for _ in range(passes):
            model(torch.ones(1, 128))
        read = (dispatched.report().bytes_moved["nvme read"] - before) / passes / group
        in_flight = prefetch / passes  # at the end
        assert 12 - memory - in_flight <= read <= 12 - max(0, memory - 1 - prefetch) + in_flight
