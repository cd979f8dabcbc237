"""A checkpoint keeps what goes on beside the engine: random numbers of every kind, schedules, the
position in the data, and the loop's own state. What is resumed draws, steps and reads as if it had
never stopped."""

from __future__ import annotations

import io
import itertools
import math
import os
import random
import signal
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

import offload
from offload.checkpoint.foreign.exporting import export
from offload.checkpoint.format.manifest import MANIFEST, RUN
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.safetensors_file import SafetensorsWriter, info_of
from offload.checkpoint.format.user_state import packed, tensor_records, value_of
from offload.errors import CheckpointError, StateError, UnsupportedError
from tests.offload.engine_cases import DEVICE, HOST, MARKS, NVME, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, states_of

pytestmark = MARKS


class Noisy(TinyLM):
    """Draws from every generator there is, and has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(5)

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        noise = random.random() + np.random.random() + self.own.random()
        return loss * (1 + noise) + torch.rand((), device=loss.device) * loss


class Reader:
    """A shuffled loader that knows where it is."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self._order: list[int] = []
        self._data = batches(8)

    def next(self) -> Tensor:
        if not self._order:
            self._order = torch.randperm(len(self._data), generator=self.generator).tolist()
        return self._data[self._order.pop()]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = state["order"]
        self.generator.set_state(state["generator"])


class Run:
    """A loop with all that such loops have."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.passes = keys.get("gradient_accumulation_steps", 1)
        self.engine = offload.initialize(seeded(Noisy), config(folder, **keys))
        optimizer = self.engine.optimizer
        self.scheduler = schedules.OneCycleLR(optimizer, 1e-2, total_steps=12)
        self.reader, self.augment = Reader(), random.Random(7)
        self.engine.register_for_checkpointing(
            scheduler=self.scheduler, reader=self.reader, augment=self.augment
        )

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            for _ in range(self.passes):
                scale = self.augment.random() / self.passes
                loss = self.engine.module.loss(self.reader.next()) * scale  # type: ignore[operator]
                self.engine.backward(loss)
                losses.append(float(loss.detach()))
            self.engine.optimizer.step()
            self.engine.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(self.scheduler.get_last_lr()[0])
        return losses


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


SHARES = {"host": "40%", "nvme": "60%"}
MIXED = {"parameters": SHARES, "gradients": "host", "optimizer": SHARES}
RECOMPUTED = {"activations": {"tier": "nvme", "checkpoint": True}}
DISK = NVME | {"gradients": "host"}
PLACEMENTS: dict[str, Any] = {
    "nvme": DISK, "host": HOST, "mixed": MIXED, "recomputed": DISK | RECOMPUTED, "device": DEVICE,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_grad_norm": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2, "clip_grad_norm": 1.0},
    "lion": {"optimizer": {"type": "lion"}},
    "8-bit": {"optimizer": {"states": "int8"}},
}
RESUMES = [
    (precision, way, saved, loaded)
    for way, precision in itertools.product(WAYS, ("fp32", "bf16", "fp16"))
    for saved, loaded in itertools.permutations(PLACEMENTS, 2)
    if not (way == "8-bit" and precision == "fp32")
]


def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path, long: bool) -> None:
    """Another placement and chunk size, and generators that are elsewhere, at the load."""
    assert len(RESUMES) >= 50
    for precision, way, saved, loaded in RESUMES if long else RESUMES[:: len(RESUMES) // 6]:
        keys = {"precision": precision, "groups": {"blocks": ["Block"]}, **WAYS[way]}
        if precision == "fp16":
            keys["loss_scale"] = {"growth_interval": 2}  # the scale changes after the resume
        numbers = keys.pop("optimizer", {})
        seed_all(1)
        whole = Run(
            tmp_path, placement=PLACEMENTS[saved], optimizer={"chunk": 2048, **numbers}, **keys
        )
        whole.steps(2)
        whole.engine.save_checkpoint(tmp_path / "saved", state={"epoch": 1})
        at_save = states_of(whole.engine)
        expected = whole.steps(3), states_of(whole.engine), random.random(), np.random.random()
        report = whole.engine.report()
        whole.engine.close()
        seed_all(2)
        resumed = Run(
            tmp_path, placement=PLACEMENTS[loaded], optimizer={"chunk": 4096, **numbers}, **keys
        )
        resumed.steps(1)  # states to overwrite
        assert resumed.engine.load_checkpoint(tmp_path / "saved") == {"epoch": 1}
        assert_same_bits(states_of(resumed.engine), at_save)
        losses, states = resumed.steps(3), states_of(resumed.engine)
        assert losses == expected[0], (precision, way, saved, loaded)
        assert_same_bits(states, expected[1])
        assert (random.random(), np.random.random()) == expected[2:]
        there = resumed.engine.report()
        assert (there.steps, there.loss_scale) == (report.steps, report.loss_scale)
        resumed.engine.check_integrity()
        resumed.engine.close()


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    with offload.initialize(seeded(TinyLM), config(tmp_path)) as engine:
        yield engine


class Decay:
    """Torch asks a callable object for its attributes."""

    def __init__(self) -> None:
        self.base = 0.9

    def __call__(self, epoch: float) -> float:
        return self.base**epoch


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "callable": lambda o: schedules.LambdaLR(o, Decay()),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "scaled cyclic": lambda o: schedules.CyclicLR(
        o, 1e-4, 1e-2, scale_fn=Decay(), cycle_momentum=False
    ),
    "nested": lambda o: schedules.ChainedScheduler(
        [
            schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.StepLR(o, 1)], [1]),
            schedules.ExponentialLR(o, 0.9),
        ]
    ),
    "step": lambda o: schedules.StepLR(o, 2),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 6),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: schedules.CyclicLR(o, 1e-4, 1e-2, cycle_momentum=False),
    "one cycle": lambda o: schedules.OneCycleLR(o, 1e-2, total_steps=9),
    "plateau": schedules.ReduceLROnPlateau,
    "polynomial": lambda o: schedules.PolynomialLR(o, 6),
    "linear": schedules.LinearLR,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_of_torch_go_on(kind: str, engine: Any, tmp_path: Path) -> None:
    def rates(scheduler: Any, count: int) -> list[float]:
        values = []
        for _ in range(count):
            engine.optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            values.append(engine.optimizer.param_groups[0]["lr"])
        return values

    scheduler = SCHEDULERS[kind](engine.optimizer)
    engine.register_for_checkpointing(scheduler=scheduler)
    rates(scheduler, 2)
    engine.save_checkpoint(tmp_path / "saved")
    expected = rates(scheduler, 4)
    engine.load_checkpoint(tmp_path / "saved")
    assert rates(scheduler, 4) == expected


STATE: dict[str, Any] = {
    "epoch": 3, "loss": 0.1, "nan": float("inf"), "name": "run", "none": None, "yes": True,
    "tuple": (1, [2.5, (3,)]), "by number": {1: "a", (2, 3): "b"}, "is": {"is": "tensor"},
    "counter": Counter(a=2), "complex": 1j, "set": {1, 2}, "bytes": b"\0\xff", "large": 1 << 100,
    "frozen": {frozenset({1}): frozenset({(1, 2)})},
    "numpy": [np.float32(0.1), np.int64(3), np.uint64((1 << 63) + 1), np.float64(0.1)],
    "empty": {}, "edges": [1 << 63, -(1 << 64), -float("inf"), 5e-324], "none key": {None: 1},
    "key of 0.5": {0.5: 1}, "odd text": "a\0\x1b[2J",
}  # fmt: skip


def scheduler_warnings(engine: Any, folder: Path, caplog: Any, **keys: Any) -> int:
    caplog.clear()
    for wait in (True, False):
        engine.save_checkpoint(folder / "saved", wait=wait, **keys)
    engine.checkpoint_saved()
    return caplog.text.count("does not have the learning-rate scheduler of engine.optimizer")  # type: ignore[no-any-return]


def test_a_scheduler_that_is_left_out_of_a_checkpoint_is_told_of_once(
    tmp_path: Path, caplog: Any
) -> None:
    """Without a word a resumed run would begin with the first learning rate again."""
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as engine:
        assert scheduler_warnings(engine, tmp_path, caplog) == 0
        schedule = schedules.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
        for state in ({}, {"schedule": schedule.state_dict()}):
            assert scheduler_warnings(engine, tmp_path, caplog, state=state) == 0
        assert scheduler_warnings(engine, tmp_path, caplog) == 1
        assert "register_for_checkpointing" in caplog.text
        assert scheduler_warnings(engine, tmp_path, caplog) == 0
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as engine:
        schedule = schedules.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
        engine.register_for_checkpointing(schedule=schedule)
        assert scheduler_warnings(engine, tmp_path, caplog) == 0


def test_the_loops_own_state_comes_back_as_it_was(engine: Any, tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {
        "bf16": torch.randn(3, 2).bfloat16(), "0-dim": torch.tensor(3), "none": torch.empty(0, 4),
        "bool": torch.tensor([True, False]), "sliced": torch.arange(10)[::3],
        "odd stride": torch.arange(6.0).reshape(1, 6)[:, 0], "turned": torch.randn(3, 2).t(),
        "e4m3": torch.ones(4).to(torch.float8_e4m3fn), "u64": torch.arange(3).view(torch.uint64),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(), "parameter": nn.Parameter(base),
        "shared": base[:4], "shared, too": base[2:], "expanded": torch.ones(1).expand(5),
    }  # fmt: skip
    given = {**STATE, "tensors": tensors, "array": np.arange(4.0), "f16": np.float16([1, 2])}
    given |= {"no number": math.nan, "big-endian": np.array([7], dtype=">i4")}
    given["turned array"] = np.arange(4).reshape(2, 2).T
    given["names"] = [np.str_("accuracy"), np.array(["a", "bc"]), np.complex64(1j)]
    engine.save_checkpoint(tmp_path / "saved", state=given)
    tensors["0-dim"].fill_(9)
    state = engine.load_checkpoint(tmp_path / "saved")
    assert {name: state[name] for name in STATE} == STATE
    assert isinstance(state["counter"], Counter)
    assert state["tensors"].pop("0-dim") == 3
    for name, tensor in state["tensors"].items():
        assert tensor.dtype is tensors[name].dtype
        assert (tensor.shape, tensor.tolist()) == (tensors[name].shape, tensors[name].tolist())
    assert [type(each) for each in state["numpy"]] == [np.float32, np.int64, np.uint64, np.float64]
    assert math.isnan(state["no number"])
    assert [each.tolist() for each in state["names"]] == ["accuracy", ["a", "bc"], 1j]
    assert (state["turned array"].tolist(), state["big-endian"].tolist()) == ([[0, 2], [1, 3]], [7])
    assert (state["array"].tolist(), state["f16"].dtype) == ([0, 1, 2, 3], np.float16)
    engine.save_checkpoint(tmp_path / "saved")
    assert engine.load_checkpoint(tmp_path / "saved") == {}


class Recursive:
    def __reduce__(self) -> Any:
        return Recursive, (Recursive(),)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(lambda: 0, "lambda"), (object(), "builtins.object"), (torch.zeros(2).to_sparse(), "sparse"),
     (Path("x"), r"pathlib\.PosixPath"), (nn.Module, "Module"), (date(2000, 1, 1), "datetime.date"),
     (np.ma.array([1, 2], mask=[0, 1]), "numpy.ma"), (torch.Generator(), "Generator"),
     (np.array([date(2000, 1, 1)]), "datetime.date"), (np.array([None]), "ObjectDType"),
     (np.datetime64("2000-01-01"), "DateTime64DType"), (np.longdouble(1), "LongDoubleDType"),
     (torch.empty(2, device="meta"), "meta tensor"), (Recursive(), "recursion")],
)  # fmt: skip
def test_what_would_be_pickled_is_refused_by_name(
    value: Any, kind: str, engine: Any, tmp_path: Path
) -> None:
    engine.save_checkpoint(tmp_path / "saved", state={"a": 1})
    with pytest.raises(UnsupportedError, match=f"state (holds|cannot be kept).*{kind}"):
        engine.save_checkpoint(tmp_path / "saved", state={"a": {"b": value}})
    assert engine.load_checkpoint(tmp_path / "saved") == {"a": 1}


class Drawing(Reader):
    """Draws when it is asked for its state, and when it gets one."""

    def state_dict(self) -> dict[str, Any]:
        torch.rand(3)
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(5)
        super().load_state_dict(state)


def test_what_registered_objects_draw_changes_nothing(engine: Any, tmp_path: Path) -> None:
    own = np.random.RandomState(np.random.PCG64(3))  # type: ignore[arg-type]
    engine.register_for_checkpointing(drawing=Drawing(), own=own)
    engine.save_checkpoint(tmp_path / "saved")
    expected = torch.rand(4).tolist(), own.random()
    engine.load_checkpoint(tmp_path / "saved")
    assert (torch.rand(4).tolist(), own.random()) == expected


class Telling(random.Random):
    """Says itself what its state is."""

    drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random()

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "state": self.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.setstate(state["state"])


SEEDS = {"number": 1 << 100, "numbers": [1, 2], "array": np.array([3, 4]), "key": 5}
NUMPY = {
    (kind.__name__, name): lambda kind=kind, seed=seed: np.random.Generator(kind(seed))
    for kind in (
        np.random.MT19937, np.random.SFC64, np.random.Philox, np.random.PCG64, np.random.PCG64DXSM
    )
    for name, seed in SEEDS.items()
}  # fmt: skip
GENERATORS: dict[str, Any] = {
    **{" ".join(names): make for names, make in NUMPY.items()},
    "of a child": lambda: np.random.default_rng(3).spawn(4)[2],
    "RandomState": lambda: np.random.RandomState(3),
    "torch": lambda: torch.Generator().manual_seed(3),
    "Python": lambda: random.Random(3),
    "telling": lambda: Telling(3),
}


def drawn(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    numbers = [generator.random(), generator.random(), getattr(generator, "drawn", 0)]
    spawned = generator.spawn(2) if isinstance(generator, np.random.Generator) else []
    return numbers + [child.random() for child in spawned]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_and_their_children_go_on(kind: str, engine: Any, tmp_path: Path) -> None:
    """In another process, and set back."""
    first = GENERATORS[kind]()
    engine.register_for_checkpointing(first=first, again=first)
    drawn(first)
    engine.save_checkpoint(tmp_path / "saved")
    expected = [drawn(first) for _ in range(3)]
    engine.load_checkpoint(tmp_path / "saved")
    assert [drawn(first) for _ in range(3)] == expected
    for other in (GENERATORS[kind](), GENERATORS[kind]()):
        drawn(other)
        engine.carried.update(first=other, again=other)
        engine.load_checkpoint(tmp_path / "saved")
        assert [drawn(other) for _ in range(3)] == expected


def test_what_has_no_state_is_refused_when_it_is_registered(engine: Any) -> None:
    loader = torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"loader is a DataLoader.*StatefulDataLoader"):
        engine.register_for_checkpointing(loader=loader)

    class Odd(Reader):
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

    with pytest.raises(UnsupportedError, match=r"odd.state_dict.*builtins\.print"):
        engine.register_for_checkpointing(odd=Odd())

    class Own(random.Random):
        def getstate(self) -> Any:
            return {"mine": 1}

    with pytest.raises(UnsupportedError, match=r"own is a Own with a getstate\(\) of its own"):
        engine.register_for_checkpointing(own=Own())
    seeds = np.random.SeedSequence(1)
    nothing = {"seeds": seeds, "bits": np.random.PCG64(1), "kind": Reader, "none": None}
    for name, value in {**nothing, "system": random.SystemRandom()}.items():
        with pytest.raises(UnsupportedError, match=rf"{name} is a .*says nothing of its state"):
            engine.register_for_checkpointing(**{name: value})
    average = AveragedModel(nn.Linear(2, 2))
    for name, value in {
        "model": engine.module, "optimizer": engine.optimizer, "average": average,
    }.items():  # fmt: skip
        with pytest.raises(UnsupportedError, match="are in each checkpoint"):
            engine.register_for_checkpointing(**{name: value})
    reader = Reader()
    engine.register_for_checkpointing(reader=reader)
    engine.register_for_checkpointing(reader=reader)
    with pytest.raises(StateError, match="reader is registered already"):
        engine.register_for_checkpointing(reader=Reader())


def test_what_is_registered_has_to_be_in_the_checkpoint(
    engine: Any, tmp_path: Path, caplog: Any
) -> None:
    engine.save_checkpoint(tmp_path / "without")
    reader = Reader()
    engine.register_for_checkpointing(reader=reader)
    before, state = states_of(engine), torch.get_rng_state()
    with pytest.raises(CheckpointError, match="no state of reader; load it before that is regist"):
        engine.load_checkpoint(tmp_path / "without")
    assert_same_bits(states_of(engine), before)
    assert torch.equal(torch.get_rng_state(), state)
    engine.save_checkpoint(tmp_path / "with")
    engine.carried.clear()
    engine.load_checkpoint(tmp_path / "with")
    assert "has the state of reader, which is not taken over" in caplog.text


def test_a_load_that_a_registered_object_refuses_says_what_is_loaded(
    engine: Any, tmp_path: Path
) -> None:
    class Refusing(Reader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("order")

    engine.register_for_checkpointing(reader=Refusing())
    engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(KeyError) as caught:
        engine.load_checkpoint(tmp_path / "saved")
    assert "is loaded, but for reader.load_state_dict()" in caught.value.__notes__[0]
    engine.module(batches(1)[0][:, :-1])  # it can be used


def edited(path: Path, change: Any) -> None:
    """A checkpoint with right hashes and another state of the run: `change` gets its values."""
    with CheckpointReader(path) as reader:
        manifest = reader.manifest
        assert manifest.run is not None
        values = {record.name: value_of(reader, record) for record in manifest.run.tensors}
    change(values)
    archives = {
        name: value if isinstance(value, Tensor) else packed(value, name)
        for name, value in values.items()
    }
    run = manifest.run.model_copy(update={"tensors": tensor_records(archives)})
    sections = [[info_of(record) for record in run.tensors]]
    (path / RUN).unlink()
    file = SafetensorsWriter(path / RUN, sections, {}, manifest.bound_to(RUN))
    for name, archive in archives.items():
        file.append(name, archive.numpy().data)
    files = {**manifest.files, RUN: file.finish()}
    new = manifest.model_copy(update={"files": files, "run": run})
    (path / MANIFEST).write_text(new.to_json())


def archive_of(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def seeds_in(run: Any) -> Any:
    return run["objects/0/numbers"]["seed_seq"]


FORGED: dict[str, Any] = {
    "random is text": lambda run: run.update({"random/0": "x"}),
    "python's key is short": lambda run: run["random/0"].update(python=(3, (1,), None)),
    "torch's is text": lambda run: run["random/0"].update(torch="x"),
    "torch's is short": lambda run: run["random/0"].update(torch=torch.ones(3, dtype=torch.uint8)),
    "numpy's is a list": lambda run: run["random/0"].update(numpy=[]),
    "a class of its author": lambda run: run.update(state=archive_of({"a": date(2000, 1, 1)})),
    "a call of its author": lambda run: run.update(state=archive_of({"a": print})),
    "no archive": lambda run: run.update(state=torch.ones(99, dtype=torch.uint8)),
    "an empty archive": lambda run: run.update(state=torch.ones(0, dtype=torch.uint8)),
    "the state is a list": lambda run: run.update(state=[1]),
    "an object is not there": lambda run: run.pop("objects/0/reader"),
    "two states for one rank": lambda run: run.update({"objects/1/reader": {}}),
    "children are negative": lambda run: seeds_in(run).update(n_children_spawned=-1),
    "seeds without end": lambda run: seeds_in(run).update(pool_size=1 << 40),
    "seeds are text": lambda run: run["objects/0/numbers"].update(seed_seq="x"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_state_of_the_run_is_refused_and_changes_nothing(
    forged: str, engine: Any, tmp_path: Path
) -> None:
    engine.register_for_checkpointing(reader=Reader(), numbers=np.random.default_rng(1))
    engine.save_checkpoint(tmp_path / "saved", state={"a": 1})
    edited(tmp_path / "saved", FORGED[forged])
    before, drawn = states_of(engine), (torch.get_rng_state(), random.getstate())
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path / "saved")
    assert_same_bits(states_of(engine), before)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]


class Counting(nn.Linear):
    """State of its own, which state_dict() has, too."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls} if self.calls < 9 else object()

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Lengthening(Counting):
    def get_extra_state(self) -> Any:
        return torch.zeros(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = len(state)


@pytest.mark.parametrize("kind", [Counting, Lengthening])
def test_extra_state_of_modules_is_kept_and_is_no_weight(
    kind: type[Counting], tmp_path: Path, caplog: Any
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
    with offload.initialize(model, config(tmp_path)) as engine:
        model[1].calls = 3
        engine.save_checkpoint(tmp_path / "saved")
        model[1].calls = 5
        engine.load_checkpoint(tmp_path / "saved")
        assert model[1].calls == 3
        assert not caplog.records
        export(tmp_path / "saved", tmp_path / "out.safetensors")
        assert (
            load_file(tmp_path / "out.safetensors").keys() == dict(model.named_parameters()).keys()
        )
        if kind is Counting:
            model[1].calls = 9
            engine.save_checkpoint(tmp_path / "saved")
            assert "leaves it out: 1._extra_state of the state dict holds builtins" in caplog.text


class Drawn(Counting):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.own = np.random.default_rng(1)


def test_what_is_not_taken_over_is_said_by_name(tmp_path: Path, caplog: Any) -> None:
    def load_into(layer: Any) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4), layer)
        with offload.initialize(model, config(tmp_path)) as engine:
            caplog.clear()
            with caplog.at_level("INFO", "offload"):
                assert engine.load_checkpoint(tmp_path / "saved") == {}
        return [
            each.getMessage().split(str(tmp_path))[1]
            for each in caplog.records
            if each.levelname == "WARNING"
        ]

    model = nn.Sequential(nn.Linear(4, 4), Drawn(4, 4))
    with offload.initialize(model, config(tmp_path)) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    assert not load_into(Drawn(4, 4))
    (random_state,) = load_into(Counting(4, 4))
    assert "the state of the generators module 1.own, which is not taken over" in random_state
    with pytest.raises(CheckpointError, match=r"Unexpected key.*1\._extra_state"):
        load_into(nn.Linear(4, 4))
    edited(tmp_path / "saved", lambda run: run.update({"random/1": run.pop("random/0")}))
    (without,) = load_into(Drawn(4, 4))
    assert "of rank 0: they go on as they are" in without
    edited(tmp_path / "saved", lambda run: run.pop("entries/1._extra_state"))
    assert "has no 1._extra_state: that module goes on as it is" in load_into(Drawn(4, 4))[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_told_between_steps(number: int, engine: Any) -> None:
    before = signal.getsignal(number)
    with engine.stop_signals() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        engine.module.loss(batches(1)[0]).backward()
        engine.optimizer.step()
        assert stop()
    assert signal.getsignal(number) is before
