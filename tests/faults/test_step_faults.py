"""Swap files that fail at any call of steps, a save and a load: the bits of a run without faults,
or an error that says why. Nothing waits for ever, and what was saved before is there."""

from __future__ import annotations

import functools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import offload
from offload.errors import ChecksumError, NoSpaceError, StorageError, StuckError
from offload.planning.plan import plan
from offload.swap.activations import activations
from tests.faults.faulty_files import FATAL, KINDS, MENDED, FaultyFiles
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)

pytestmark = pytest.mark.sample(3)

DATA = batches(4)
SAVED, CALLS = 2, 320  # steps before the first save; most calls from there to the end
HITS: Counter[str] = Counter()
SAYS = {"ENOSPC": NoSpaceError, "flip": ChecksumError, "torn": ChecksumError, "stuck": StuckError}


@dataclass(frozen=True)
class Case:
    """One call goes wrong, if there are so many after the first save."""

    kind: str
    call: int
    host: str = "400KiB"
    precision: str = "fp32"
    clips: bool = True
    always: bool = False  # and all that follow
    parks: bool = False  # activations are on nvme, too

    @classmethod
    def drawn(cls, seed: int) -> Case:
        drawn = random.Random(seed)
        return cls(
            KINDS[seed % len(KINDS)], drawn.randrange(CALLS),
            drawn.choice(["400KiB", "400KiB", "1MiB"]), drawn.choice(["fp32", "bf16"]),
            drawn.random() < 0.7, parks=drawn.random() < 0.5,
        )  # fmt: skip

    @contextmanager
    def engine(self, folder: Path, placement: dict[str, Any]) -> Iterator[offload.Engine]:
        host = self.host if placement == NVME else "16MiB"
        if self.parks and placement == NVME:
            host = {"400KiB": "480KiB"}.get(host, host)  # with the window they pass through
            placement = {**NVME, "activations": {"tier": "nvme", "checkpoint": False}}
        keys = config(
            folder, placement, budget={"host": host, "nvme": "64MiB"},
            nvme={"paths": [str(folder)], "backend": "threads"},
            precision=self.precision, clip_grad_norm=1.0 if self.clips else None,
            optimizer={"lr": 1e-2, "chunk": 1024},
        )  # fmt: skip
        with offload.initialize(seeded(TinyLM), keys) as engine:
            yield engine


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Park the activations of small models, too."""
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    monkeypatch.setattr(plan, "MIN_WINDOW_NBYTES", 64 << 10)


@functools.cache
def expected(precision: str, clips: bool) -> dict[str, Tensor]:
    """The states after all steps, wherever they live."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case("", 0, precision=precision, clips=clips)
        with case.engine(Path(folder), HOST) as engine:
            train(engine, range(len(DATA)))
            return states_of(engine)


def train(engine: offload.Engine, steps: range) -> None:
    losses_of(engine, [DATA[number] for number in steps])


def meet(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[StorageError | None, FaultyFiles]:
    """The error, if there was any; whatever happened, `case` has ended well."""
    saved, later, files = folder / "saved", folder / "later", FaultyFiles()
    whole, rest = expected(case.precision, case.clips), range(SAVED, len(DATA))
    caught: StorageError | None = None
    with files.installed(monkeypatch):
        making = case.engine(folder, NVME)
        engine = making.__enter__()
    try:
        train(engine, range(SAVED))
        engine.save_checkpoint(saved)
        files.arm(case.call, case.kind, always=case.always)
        train(engine, rest[:1])
        engine.save_checkpoint(later)
        engine.load_checkpoint(saved)
        train(engine, rest)
        assert_same_bits(states_of(engine), whole)
    except StorageError as error:
        caught = error
    finally:
        try:
            with suppress(StorageError):  # of another part, not raised in a wait so far
                engine.close()
            making.__exit__(None, None, None)
        finally:
            files.release()
    if files.hit:
        HITS[files.hit.rpartition(" at ")[0]] += 1
    if caught is not None:
        assert str(folder) in str(caught), files.hit
        for path, steps in ((saved, rest), (later, rest[1:])):
            if path.exists():
                with case.engine(folder, HOST) as engine:
                    engine.load_checkpoint(path)
                    train(engine, steps)
                    assert_same_bits(states_of(engine), whole)
    return caught, files


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Counts of each outcome; shown with -s."""
    yield
    lines = [f"{what:45}{number:7}" for what, number in sorted(HITS.items())]
    print(*lines, f"{'all':45}{HITS.total():7}", sep="\n")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_seed" in metafunc.fixturenames:
        many = metafunc.config.getoption("--long")
        metafunc.parametrize("case_seed", range(3000 if many else len(KINDS)))


def test_drawn_faults_leave_the_bits_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case_seed: int
) -> None:
    case = Case.drawn(case_seed)
    error, files = meet(case, tmp_path, monkeypatch)
    assert error is None or case.kind in FATAL, files.hit


@pytest.mark.parametrize("kind", MENDED)
def test_what_can_be_mended_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    error, files = meet(Case(kind, 5), tmp_path, monkeypatch)
    assert error is None
    assert files.hit


def test_activations_on_nvme_are_met_too(tmp_path: Path) -> None:
    with Case("", 0, parks=True).engine(tmp_path, NVME) as engine:
        train(engine, range(1))
        moved = engine.report().bytes_moved
    assert moved["activations parked"] > 0


@pytest.mark.parametrize("kind", FATAL)
def test_what_cannot_be_mended_is_an_error_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    error, files = meet(Case(kind, 0, always=True), tmp_path, monkeypatch)
    assert files.hit
    assert isinstance(error, SAYS.get(kind, StorageError))
