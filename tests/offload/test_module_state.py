"""What modules save besides parameters, and take over in ways of their own: as plain PyTorch does
with `torch.save(model.state_dict())` and `model.load_state_dict(...)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
from offload.errors import CheckpointError, StateError, UnsupportedError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, config, seeded
from tests.offload.engine_states import assert_same_bits, states_of

pytestmark = MARKS
WIDTH = 4


class Growing(nn.Module):
    """A queue that each forward makes longer, and buffers that there are from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.zeros(0, WIDTH, device=ON))
        self.register_buffer("later", None)
        self.register_buffer("scratch", torch.zeros(0, device=ON), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.queue = torch.cat([self.queue, y.detach()])
        self.later = y.detach().double().sum(0)
        self.scratch = y.detach().flatten()
        return y


class Resizing(Growing):
    """The usual way."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("queue", "later"):
            if prefix + name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[prefix + name]))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Hooked(Growing):
    """By a hook before and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.make_room)
        self.register_load_state_dict_post_hook(self.count)

    @staticmethod
    def make_room(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        for name in ("queue", "later"):
            if prefix + name in state_dict:
                setattr(module, name, state_dict[prefix + name].clone())

    @staticmethod
    def count(module: Any, keys: Any) -> None:
        module.rows = len(module.queue)


class ByExtraState(Growing):
    """`set_extra_state` is told the size, and comes after the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._non_persistent_buffers_set |= {"queue", "later"}

    def get_extra_state(self) -> Any:
        return {"queue": self.queue.clone(), "later": self.later}

    def set_extra_state(self, state: Any) -> None:
        self.queue, self.later = state["queue"].to(ON), state["later"]
        self.later = self.later if self.later is None else self.later.to(ON)
        self.bias_then = self.linear.bias.detach().clone()  # the one that was just loaded


class Renaming(Growing):
    """Saves by other names, and something that is no buffer, nor a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self._register_state_dict_hook(self.rename)
        self._register_load_state_dict_pre_hook(self.rename_back)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)

    def rename(self, module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}fifo"] = state_dict.pop(f"{prefix}queue")
        state_dict[f"{prefix}w"] = state_dict.pop(f"{prefix}linear.weight")
        state_dict[f"{prefix}seen"] = torch.tensor(self.seen)
        state_dict[f"{prefix}words"] = ["a", self.seen]

    def rename_back(self, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict[f"{prefix}queue"] = state_dict.pop(f"{prefix}fifo")
        for name in {"queue", "later"} & {key.removeprefix(prefix) for key in state_dict}:
            setattr(self, name, torch.empty_like(state_dict[prefix + name]))
        state_dict[f"{prefix}linear.weight"] = state_dict.pop(f"{prefix}w")
        self.seen = int(state_dict.pop(f"{prefix}seen"))
        self.words = state_dict.pop(f"{prefix}words")


class Versioned(Resizing):
    _version = 3

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, *rest: Any
    ) -> None:
        assert metadata.get("version") == 3
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class Whole(nn.Module):
    def __init__(self, kind: type[nn.Module] = Resizing) -> None:
        super().__init__()
        self.inner = nn.Sequential(kind(), nn.BatchNorm1d(WIDTH))
        self.head = nn.Linear(WIDTH, 2)
        self.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x))
        return y


class Asked(Whole):
    """The model itself has ways of its own."""

    def __init__(self) -> None:
        super().__init__(Growing)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def state_dict(self, *args: Any, **keys: Any) -> Any:
        entries = super().state_dict(*args, **keys)
        entries["calls"] = torch.tensor(self.calls)
        return entries

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        given = dict(state_dict)
        self.calls = int(given.pop("calls"))
        for name in ("queue", "later"):
            if f"inner.0.{name}" in given:
                setattr(self.inner[0], name, torch.empty_like(given[f"inner.0.{name}"]))
        return super().load_state_dict(given, strict, assign)


MODELS: dict[str, Callable[[], Any]] = {
    kind.__name__: (lambda kind=kind: Whole(kind))
    for kind in (Resizing, Hooked, ByExtraState, Renaming, Versioned)
} | {"Asked": Asked}


def train(model: nn.Module, optimizer: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for _ in range(steps):
        model(torch.randn(3, WIDTH, generator=generator).to(ON, dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def kept(model: nn.Module) -> dict[str, Any]:
    """Buffers, and what these modules have as attributes."""
    values: dict[str, Any] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for name in ("seen", "words", "rows", "calls"):
            if name in vars(module):
                values[f"{path}.{name}"] = vars(module)[name]
    return values


def as_plain_loads(build: Callable[[], Any], state: dict[str, Any]) -> dict[str, Any]:
    plain = seeded(build, 5).to(ON)
    plain.load_state_dict(state)
    return kept(plain)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


@pytest.mark.sample(4)
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_resume_asks_modules_as_load_state_dict_does(
    kind: str, placement: dict[str, Any], tmp_path: Path, long: bool
) -> None:
    if not long and kind not in ("Resizing", "Renaming") and placement is HOST:
        pytest.skip("on nvme: --long has both")
    build = MODELS[kind]
    keys = config(tmp_path, placement, precision="bf16" if kind == "Resizing" else "fp32")
    if kind == "Resizing":
        build = lambda: Whole().bfloat16()  # noqa: E731
    with offload.initialize(seeded(build), keys) as engine:
        train(engine.module, engine.optimizer, 2, seed=1)
        engine.save_checkpoint(tmp_path / "saved")
        expected = as_plain_loads(build, engine.module.state_dict()), states_of(engine)
        train(engine.module, engine.optimizer, 2, seed=2)
        goes_on = states_of(engine)
    model = seeded(build, 3)
    with offload.initialize(model, keys) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_equal(kept(model), expected[0])
        assert_same_bits(states_of(engine), expected[1])
        if kind == "ByExtraState":
            assert torch.equal(model.inner[0].bias_then, model.inner[0].linear.bias.detach())
        train(engine.module, engine.optimizer, 2, seed=2)
        assert_same_bits(states_of(engine), goes_on)


class Fragile(Resizing):
    fails = False

    def set_extra_state(self, state: Any) -> None:
        self.touched = torch.full((), 7.0)
        if self.fails:
            raise ValueError("no such state")

    def get_extra_state(self) -> Any:
        return {"a": 1}


class Replacing(Resizing):
    """Takes a parameter of another size over."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.fails:
            self.linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    fails = False


@pytest.mark.slow
def test_what_modules_refuse_is_an_error_and_nothing_goes_on_from_a_part_of_it(
    tmp_path: Path,
) -> None:
    cases: list[tuple[Any, Callable[[Any], None], str]] = [
        (Growing, lambda m: None, "of another model, .*size mismatch for inner.0.queue"),
        (Fragile, lambda m: setattr(m, "fails", True), "raises ValueError: no such state; build"),
        (Replacing, lambda m: setattr(m, "fails", True), "in the place of inner.0.linear.weight"),
        (Resizing, lambda m: m.register_buffer("more", torch.ones(2)), "Missing key.*0.more"),
        (Growing, lambda m: m.register_buffer("queue", torch.zeros(6, WIDTH).double()),
         "buffer inner.0.queue is torch.float32 there"),
    ]  # fmt: skip
    for kind, change, text in cases:
        keys = config(tmp_path)
        with offload.initialize(seeded(lambda kind=kind: Whole(kind)), keys) as engine:
            train(engine.module, engine.optimizer, 2, seed=1)
            engine.save_checkpoint(tmp_path / "saved")
        model = seeded(lambda kind=kind: Whole(kind), 3)
        engine = offload.initialize(model, keys)
        if kind is Growing and "queue" in text:
            model.inner[0].queue = torch.zeros(0, WIDTH)
        change(model.inner[0])
        with pytest.raises(CheckpointError, match=text):
            engine.load_checkpoint(tmp_path / "saved")
        if engine.store.unusable is not None:
            with pytest.raises(StateError, match="are a mixture"):
                train(engine.module, engine.optimizer, 1, seed=2)
        engine.close("drop")


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_state_dicts_load_as_into_a_plain_model(placement: dict[str, Any], tmp_path: Path) -> None:
    plain = seeded(Whole)
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), 2, seed=1)
    state = plain.state_dict()
    expected = as_plain_loads(Whole, state)
    keys = config(tmp_path, placement)
    model = seeded(Whole, 3)
    with offload.initialize(model, keys) as engine:
        model.load_state_dict(state)
        assert_equal(kept(model), expected)
        assert_same_bits(model.state_dict(), state)
        for refused in (model, model.inner[0]):
            with pytest.raises(UnsupportedError, match=r"assign=True.* in the place of parameters"):
                refused.load_state_dict(refused.state_dict(), assign=True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with pytest.raises(UnsupportedError, match="set_swap_module_params_on_conversion"):
                model.load_state_dict(state)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert_same_bits(model.state_dict(), state)
        train(model, engine.optimizer, 1, seed=2)
    model = seeded(Whole, 3)
    offload.dispatch(model, keys)
    with offload.dispatched(model):
        model.load_state_dict(state)
        assert_equal(kept(model), expected)
        assert_same_bits(model.state_dict(), state)


def test_buffers_of_files_have_the_shape_that_the_model_has(tmp_path: Path) -> None:
    plain = seeded(lambda: Whole(Growing))
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), 1, seed=1)
    file, text = tmp_path / "model.safetensors", r"queue has shape \(3, 4\), in the model \(0, 4\)"
    save_file(plain.state_dict(), file)
    with pytest.raises(CheckpointError, match=f"weights: .*{text}"):
        offload.initialize(Whole(Growing), config(tmp_path), weights=file)
