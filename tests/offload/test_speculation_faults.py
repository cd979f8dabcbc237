"""Files that fail between a speculative update and the step that decides: the bits of a run without
faults, or an error that says why. What was saved before goes on to the same bits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import NoSpaceError, StorageError
from tests.faults.faulty_files import FaultyFiles
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, plan_for_a_gpu, seeded
from tests.offload.engine_states import assert_same_bits, states_of

ERRORS = ("EIO", "ENOSPC", "end of file")
RETRIED = ("short", "ragged", "EINTR", "EAGAIN")  # these end as if nothing had been
# the event that decides: the step as speculated, another one, or a use of the old version
VERDICTS = ("keep", "clip", "skip", "lr", "read", "settle", "drop", "states", "more")
DATA = batches(4)
FAULTY = 2  # the step that meets the fault: the first does not speculate, the second decides that
MIXED = {"parameters": "nvme", "gradients": "nvme", "optimizer": {"host": "60%", "nvme": "40%"}}


@dataclass(frozen=True)
class Case:
    """One call of step `FAULTY` fails, from its backward on or, `late`, from the end of that on."""

    verdict: str
    kind: str
    after: int = 0  # so many calls come before it
    late: bool = False
    host: str = "16MiB"
    precision: str = "bf16"
    chunk: int = 2048
    coded: bool = False  # beside a GPU; then codes undo updates of the records in host memory

    @property
    def faulty(self) -> int:
        return FAULTY + 6 * self.coded  # the first codes do not suffice

    @classmethod
    def drawn(cls, seed: int, *, coded: bool = False) -> Case:
        drawn = random.Random(seed)
        return cls(
            VERDICTS[seed % len(VERDICTS)], drawn.choice(ERRORS + RETRIED),
            drawn.randrange(48), drawn.random() < 0.4,
            drawn.choice(["1MiB", "16MiB"]), drawn.choice(["fp32", "bf16"]),
            drawn.choice([2048, 16384]), coded,
        )  # fmt: skip

    @contextmanager
    def engine(self, folder: Path, placement: dict[str, Any]) -> Iterator[offload.Engine]:
        keys = config(
            folder, placement, budget={"device": "4MiB", "host": self.host, "nvme": "64MiB"},
            nvme={"paths": [str(folder)]}, precision=self.precision,
            clip_grad_norm=1e9, skip_nonfinite=True, optimizer={"lr": 1e-2, "chunk": self.chunk},
        )  # fmt: skip
        with offload.initialize(seeded(TinyLM), keys) as engine:
            yield engine


def backward(engine: offload.Engine, tokens: Tensor, factor: float = 1.0) -> None:
    engine.backward(engine.module.loss(tokens) * factor)  # type: ignore[operator]


def decide(engine: offload.Engine, verdict: str, tokens: Tensor) -> None:
    """What a loop does between a backward and the next one."""
    model, optimizer = engine.module, engine.optimizer
    numbers = optimizer.param_groups[0]
    lr = numbers["lr"]
    if verdict == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    elif verdict == "lr":
        numbers["lr"] = lr / 2
    elif verdict == "read":
        for param in model.parameters():
            param.detach().sum()
    elif verdict == "settle":
        engine.settle()
    elif verdict == "states":
        optimizer.state_dict()
    elif verdict == "more":
        backward(engine, tokens)
    elif verdict == "drop":
        optimizer.zero_grad()
    optimizer.step()
    numbers["lr"] = lr
    optimizer.zero_grad()


def train(
    engine: offload.Engine, steps: range, case: Case, faults: FaultyFiles | None = None
) -> None:
    for number in steps:
        tokens, last = DATA[number % len(DATA)], number == case.faulty
        factor = math.inf if last and case.verdict == "skip" else 1.0
        if last and faults is not None and not case.late:
            faults.arm(case.after, case.kind)
        backward(engine, tokens, factor)
        if last and faults is not None and case.late:
            faults.arm(case.after, case.kind)
        decide(engine, case.verdict if last else "keep", tokens)
    engine.settle()


def meet(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> StorageError | None:
    """The error, if there was any; whatever happened, `case` has ended well."""
    saved, faults = folder / "saved", FaultyFiles()
    first, rest = range(case.faulty), range(case.faulty, case.faulty + 2)
    with case.engine(folder, HOST) as engine:
        train(engine, range(rest.stop), case)
        expected = states_of(engine)
    with faults.installed(monkeypatch), monkeypatch.context() as patched:
        if case.coded:
            plan_for_a_gpu(patched)
        making = case.engine(folder, MIXED if case.coded else NVME)
        engine = making.__enter__()
    caught: StorageError | None = None
    try:
        train(engine, first, case)
        engine.save_checkpoint(saved)
        train(engine, rest, case, faults)
        assert_same_bits(states_of(engine), expected)
    except StorageError as error:
        caught = error
        engine.report()
        with suppress(StorageError):  # training on raises it again, or lost nothing
            engine.optimizer.zero_grad()
            train(engine, rest, case)
            assert_same_bits(states_of(engine), expected)
    finally:
        with suppress(StorageError):  # of another part, not raised in a wait so far
            engine.close()
        making.__exit__(None, None, None)
    if caught is not None:
        assert str(folder) in str(caught)
        with case.engine(folder, HOST) as engine:
            engine.load_checkpoint(saved)
            train(engine, rest, case)
            assert_same_bits(states_of(engine), expected)
    return caught


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_seed" in metafunc.fixturenames:
        many = metafunc.config.getoption("--long")
        metafunc.parametrize("case_seed", range(360 if many else 9))


@pytest.mark.sample(3)
def test_drawn_faults_leave_the_bits_or_an_error(
    tmp_path: Path, case_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.drawn(case_seed, coded=case_seed % 2 == 1)
    error = meet(case, tmp_path, monkeypatch)
    assert error is None or case.kind in ERRORS


@pytest.mark.sample(3)
@pytest.mark.parametrize("verdict", ["keep", "read", "drop"])
def test_a_speculative_write_that_fails_is_an_error_whatever_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    error = meet(Case(verdict, "ENOSPC"), tmp_path, monkeypatch)
    assert isinstance(error, NoSpaceError)
    assert "lower budget.nvme" in str(error)
