"""Experts that miss steps end with the bits of experts that get a gradient of zeros in each."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload.kernels.bits import DTYPE_OF
from offload.kernels.floats import Float, serial
from offload.kernels.rules import AdagradScalars, AdamScalars, LionScalars, SgdScalars, StateFormat
from offload.kernels.variants import Master
from offload.swap.device.device_slot import Links
from offload.swap.device.streams import CopyStream, WorkStream
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.fetching import Fetcher
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.slot import Slot
from offload.swap.states.state import HostPiece, State
from offload.swap.states.trace import Trace
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease
from offload.zero.experts.packed import ExpertTable, PackedParam
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.groups.group import Classes, ParamGroup
from offload.zero.groups.layout import ParamShape, lay_out
from offload.zero.ranks.sharding import Part
from offload.zero.step import lazy_updates
from offload.zero.step.device_update import DeviceWork
from offload.zero.step.matrices import MatrixWork
from offload.zero.step.optimizer_state import Hyper, OptimizerState
from offload.zero.step.records import RecordFormat
from offload.zero.step.stepper import StepOutcome, Stepper, StepRules
from offload.zero.step.update import UpdateQueue
from tests.swap.state_conformance import Places, make_places

NUMELS = (4500, 40)  # of an expert's weight and bias, which has no weight decay
CHUNK = 4096  # elements: a weight lies in two chunks
EXPERTS = 4
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
SGD = RecordFormat(Master.NONE, ("momentum_buffer",))


class Unread(MemoryState):
    """Gradients, which count how often an update asks for them."""

    reads = 0

    def host_piece(self, piece: int) -> HostPiece | None:
        Unread.reads += 1
        return super().host_piece(piece)


class Table:
    """The rows of two packed parameters, in memory or in a file; no model."""

    def __init__(
        self, places: Places, *, replays: bool, own: Float = Float.FP32,
        kept: RecordFormat | None = None, in_file: bool = False, kind: Any = AdamScalars,
        **rules: Any,
    ) -> None:  # fmt: skip
        """`replays`: whether a step without a gradient is missed; else it has one of zeros."""
        self._places, self._own, self._in_file = places, own, in_file
        self._kept = RecordFormat(Master.NONE) if kept is None else kept
        self.kind = kind
        self.replays = replays
        self.numbers: dict[str, Any] = {"lr": 1e-2, **(ADAM if kind is AdamScalars else {})}
        self.decay = 0.1
        self.left_out: set[int] = set()  # parameters in no param group, by place in the expert
        staging = [self._lease("staging", 96 << 10).tensor for _ in range(3)] if in_file else []
        self._run = ParallelRunner(1)
        cpu = torch.device("cpu")
        work = DeviceWork(WorkStream(cpu), Links(CopyStream(cpu), CopyStream(cpu)))
        none = MatrixWork(torch.empty(0), torch.empty(0), torch.float32)
        self.updates = UpdateQueue(own, self._run, 7, staging, Fetcher(0), work, none)
        self.states = [self._state(index) for index in range(EXPERTS)]
        self.groups = [state.group for state in self.states]
        table = ExpertTable("experts", self.groups)
        for place, name in enumerate(("weight", "bias")):
            table.packed[name] = self._packed(place, f"experts.{name}")
        self.packed = list(table.packed.values())
        self.stepper = Stepper(
            self.states, self.updates, StepRules(**rules), Trace(), None,
            tables=[table] if replays else [],
        )  # fmt: skip
        self.stepper.norms.add_in([[(0, 0)]])  # where both tables have the same gradient
        self.stepper.policy.hyper_source = lambda: self.hyper

    def _packed(self, place: int, name: str) -> PackedParam:
        rows = [group.params[place] for group in self.groups]
        places = [(group, place) for group in self.groups]
        whole = nn.Parameter(torch.zeros(EXPERTS, NUMELS[place]))
        return PackedParam(whole, (name,), rows, nn.Parameter, places)

    def _lease(self, name: str, nbytes: int) -> Lease:
        return self._places.homes.lease(nbytes, owner=name, state_class=StateClass.PARAMETERS)

    def _home(self, name: str, nbytes: int, piece: int) -> State:
        if self._in_file:
            slot = Slot(name, nbytes, StateClass.PARAMETERS, self._places.host, lambda: 1.0)
            return CachedFileState(self._places.store, slot, piece)
        return MemoryState(name, nbytes, piece, self._lease(name, nbytes))

    def _state(self, index: int) -> OptimizerState:
        layout = lay_out([ParamShape((f"{index}.{n}",), (m,)) for n, m in enumerate(NUMELS)])
        params = [nn.Parameter(torch.zeros(spec.shape)) for spec in layout.params]
        itemsize, dtype = self._own.nbytes, DTYPE_OF[self._own]
        state = self._home(f"parameters of {index}", layout.numel * itemsize, CHUNK * itemsize)
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(layout.numel, generator=generator).to(dtype)
        state.host_blank().copy_(values.view(torch.uint8))
        state.mark_host_dirty()
        group = ParamGroup(
            index, f"expert {index}", layout, params, dtype, state, torch.device("cpu"),
            lambda kind: Classes(kind, kind, kind),
        )  # fmt: skip
        group.adopt()

        def accumulator(itemsize: int) -> Unread:
            name, nbytes = f"gradients of {index}", layout.numel * itemsize
            return Unread(name, nbytes, CHUNK * itemsize, self._lease(name, nbytes))

        gradients = GradientAccumulator(
            group.name, layout.params, self._own, self._own, accumulator, serial
        )
        chunks = layout.chunks(CHUNK)
        records = []
        for number, chunk in enumerate(chunks):
            nbytes = self._kept.nbytes(len(chunk))
            record = self._home(f"record {number} of {index}", nbytes, nbytes)
            record.host_blank().zero_()
            record.mark_host_dirty()
            records.append(record)
        steps = np.zeros(len(params), np.int64)
        part = Part.of(layout, 0)
        return OptimizerState(group, gradients, chunks, records, self._kept, steps, part)

    def hyper(self, param: nn.Parameter) -> Hyper | None:
        place = int(param.numel() != NUMELS[0])
        if place in self.left_out:
            return None
        numbers = {**self.numbers, "weight_decay": 0.0 if place else self.decay}
        return Hyper(self.kind, tuple(numbers.items()))

    def backward(self, touched: set[int], seed: int = 0, scale: float = 1.0) -> None:
        """The module took part; the experts `touched` got tokens."""
        for packed in self.packed:
            if packed.param.requires_grad:
                packed.param.grad = torch.zeros(1).expand(packed.param.shape)
        for index, state in enumerate(self.states):
            if self.replays and index not in touched:
                continue
            state.group.pending_update.wait()  # a forward did, and it reads the last gradients
            generator = torch.Generator().manual_seed(1000 * seed + index)
            for place, numel in enumerate(NUMELS):
                drawn = torch.randn(numel, generator=generator) * scale
                if not self.packed[place].param.requires_grad:
                    continue
                self.stepper.check_arrival(state)
                given = drawn if index in touched else torch.zeros(numel)
                state.gradients.add(place, given.to(DTYPE_OF[self._own]))
                self.stepper.arrived(state, place)

    def step(self) -> StepOutcome:
        outcome = self.stepper.step(self.hyper)
        self.stepper.zero_grad()
        for packed in self.packed:
            packed.param.grad = None
        return outcome

    def weights(self, index: int) -> Tensor:
        return self.groups[index].flat()[: sum(NUMELS)].clone()

    def content(self) -> dict[str, Any]:
        self.stepper.policy.complete_steps()
        self.updates.settle()
        kept: dict[str, Any] = {}
        for index, state in enumerate(self.states):
            kept[f"weights {index}"] = state.group.flat().view(torch.uint8).numpy().tobytes()
            kept[f"steps {index}"] = state.steps.tolist()
            for number, (record, chunk) in enumerate(zip(state.records, state.chunks, strict=True)):
                for name, array in self._kept.arrays(record.host_tensor(), len(chunk)).items():
                    kept[f"{name} {number} {index}"] = array.tobytes()
        return kept

    def close(self) -> None:
        self.updates.settle()
        self.updates.close()
        self._run.close()


Pair = tuple[Table, Table]
Make = Callable[..., Pair]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Two tables: one whose experts miss steps, one whose experts get zeros."""
    with ExitStack() as made:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        homes = [made.enter_context(_places(tmp_path / name)) for name in "ab"]

        def pair(**how: Any) -> Pair:
            tables = [
                made.enter_context(closing(Table(places, replays=replays, **how)))
                for places, replays in zip(homes, (True, False), strict=True)
            ]
            return tables[0], tables[1]

        yield pair


class _places:  # noqa: N801
    def __init__(self, folder: Path) -> None:
        self._made = make_places(folder)

    def __enter__(self) -> Places:
        return next(self._made)

    def __exit__(self, *_: object) -> None:
        next(self._made, None)


def assert_same(pair: Pair) -> None:
    actual, expected = (table.content() for table in pair)
    assert [name for name in expected if actual[name] != expected[name]] == []


def take(
    pair: Pair, steps: Sequence[set[int]], begin: Callable[[Table, int], object] | None = None
) -> None:
    """Steps in which the experts of each set get tokens, in both tables, which then are the same.
    `begin` prepares a table for the step of a number."""
    for step, touched in enumerate(steps):
        for table in pair:
            if begin is not None:
                begin(table, step)
            table.backward(touched, step)
            table.step()
    assert_same(pair)


FORMATS = [
    (Float.FP32, RecordFormat(Master.NONE)),
    (Float.BF16, RecordFormat(Master.SPLIT)),
    (Float.BF16, RecordFormat(Master.NONE, state_format=StateFormat.BF16)),
    (Float.BF16, RecordFormat(Master.FP32, state_format=StateFormat.INT8)),
    (Float.FP16, RecordFormat(Master.FP32)),
]


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize(("own", "kept"), FORMATS)
def test_a_missed_step_is_one_with_zeros(
    make: Make, own: Float, kept: RecordFormat, in_file: bool
) -> None:
    pair = make(own=own, kept=kept, in_file=in_file)
    steps = [{0, 1, 2, 3}, {0}, {0, 1}, {0}, {0, 1, 3}]
    take(pair, steps, lambda table, step: table.numbers.update(lr=0.005 * 0.5**step))


OTHERS = [
    (LionScalars, {"beta1": 0.9, "beta2": 0.99}, ("exp_avg",)),
    (AdagradScalars, {"eps": 1e-10, "lr_decay": 0.1}, ("sum",)),
    (SgdScalars, {"momentum": 0.0}, ()),
    (SgdScalars, {"momentum": 0.9, "dampening": 0.5, "maximize": True}, ("momentum_buffer",)),
    (SgdScalars, {"momentum": 0.9, "nesterov": True}, ("momentum_buffer",)),
    (AdamScalars, {**ADAM, "decoupled": False}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
]


@pytest.mark.parametrize(("kind", "numbers", "states"), OTHERS)
def test_every_rule(make: Make, kind: Any, numbers: dict[str, Any], states: tuple[str]) -> None:
    pair = make(kind=kind, kept=RecordFormat(Master.NONE, states))
    for table in pair:
        table.numbers.update(numbers)
    take(pair, [{0}, {0, 1}, set[int](), {0, 2}])


def test_momentum_that_begins_and_ends_between_missed_steps(make: Make) -> None:
    def begin(table: Table, step: int) -> None:
        momentum = (0.9, 0.0, 0.0, 0.5, 0.9)[step]
        table.numbers.update(momentum=momentum, nesterov=step == 3)

    take(make(kind=SgdScalars, kept=SGD), [*[{0}] * 4, {0, 1, 2}], begin)


# ------------------------------------------------------------------ what is read, and when
def test_values_from_before_a_missed_step_are_outdated(make: Make) -> None:
    lazy, _ = make()
    versions = [group.writes.version for group in lazy.groups]
    for step in range(3):
        lazy.backward({0}, step)
        lazy.step()
    assert lazy.groups[1].writes.version > versions[1]


# ------------------------------------------------------------------ steps that are not missed


def test_parameters_in_no_param_group_or_frozen_meanwhile_are_left_alone(make: Make) -> None:
    def begin(table: Table, step: int) -> None:
        table.left_out = {1} if step in (1, 2) else set()
        table.packed[0].param.requires_grad_(step not in (2, 3))

    pair = make()
    take(pair, [{0}] * 6, begin)
    assert pair[0].states[3].steps.tolist() == [4, 4]


# ------------------------------------------------------------------ the log
def log_of(table: Table) -> Any:
    return table.stepper.policy.missed


def test_experts_in_shards_make_each_step_with_the_other_ranks(make: Make) -> None:
    pair = make()
    for table in pair:
        for group in table.groups:
            group.layout = replace(group.layout, ranks=2)
        table.backward({0}, 1)
        table.step()
    assert not log_of(pair[0])._steps
    assert all(pair[0].groups[index].pending_update.ready is not None for index in range(EXPERTS))
    assert_same(pair)


def test_in_backward_a_group_that_is_not_updated_ahead_misses_the_step(make: Make) -> None:
    take(make(in_backward=True), [{0, 1, 2, 3}, {0}, {0, 1}, {0}, {2}])


# ------------------------------------------------------------------ all at once
@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_many_drawn_steps(make: Make, in_file: bool, monkeypatch: Any, long: bool) -> None:
    monkeypatch.setattr(lazy_updates, "MAX_MISSED", 20)
    kept = RecordFormat(Master.SPLIT, state_format=StateFormat.BF16)
    pair = make(own=Float.BF16, kept=kept, in_file=in_file, skip_nonfinite=True)
    draw = random.Random(17)
    for step in range(400 if long else 60):
        lr, decay = 10 ** draw.uniform(-4, -1), draw.choice([0.0, 0.1])
        touched = {0, *(index for index in range(1, EXPERTS) if draw.random() < 0.15)}
        passes, took_part = draw.choice([1, 1, 2]), draw.random() < 0.9
        scale = float("inf") if draw.random() < 0.05 else 1.0
        left_out = {1} if draw.random() < 0.1 else set[int]()
        read = draw.randrange(EXPERTS) if draw.random() < 0.3 else None
        for table in pair:
            table.numbers["lr"], table.decay, table.left_out = lr, decay, left_out
            for number in range(passes if took_part else 0):
                table.backward(touched, 10 * step + number, scale)
            table.step()
        if read is not None:
            assert torch.equal(*(table.weights(read) for table in pair))
        counts = [[state.steps.tolist() for state in table.states] for table in pair]
        assert counts[0] == counts[1]
        assert len(log_of(pair[0])._steps) <= 20
    assert_same(pair)
