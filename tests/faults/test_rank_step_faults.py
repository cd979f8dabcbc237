"""Swap files that fail on one of several ranks, at any call of a step, a save or a load: the bits
of a run without faults on all ranks, or an error on all of them, soon. What was saved before is
there."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import offload
from offload.errors import OffloadError
from tests.faults.checkpoint_bench import MAX_S
from tests.faults.faulty_files import FATAL, KINDS, FaultyFiles
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
from tests.ranks.processes import run_ranks

STEPS, SAVED = 4, 2
VERBS = ("step", "save", "load")
CALLS = {"step": 90, "save": 60, "load": 60}  # most of them in one, on one rank
SHORT = (3, 7)  # seeds: one that is mended, and an error
ENDS: Counter[str] = Counter()


@dataclass(frozen=True)
class Case:
    """One call on a rank goes wrong, if there are so many in the `verb`; with `always` all behind
    it as well."""

    verb: str
    kind: str
    call: int
    rank: int
    ranks: int
    stage: int
    always: bool
    precision: str

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = random.Random(seed)
        kind, verb = KINDS[seed % len(KINDS)], draw.choice(VERBS)
        ranks = draw.choice([2, 2, 2, 3])
        return cls(
            verb, kind, draw.randrange(CALLS[verb]), draw.randrange(ranks), ranks,
            draw.randrange(4), draw.random() < 0.2, draw.choice(["fp32", "bf16"]),
        )  # fmt: skip

    def keys(self, folder: Path) -> dict[str, Any]:
        return config(
            folder, NVME, budget={"host": "2MiB", "nvme": "64MiB"}, precision=self.precision,
            nvme={"paths": [str(folder)], "backend": "threads"},
            zero={"stage": self.stage, "timeout_s": 2 * MAX_S}, clip_grad_norm=1.0,
            optimizer={"lr": 1e-2, "chunk": 1024},
        )  # fmt: skip


@dataclass(frozen=True)
class End:
    """Of one rank, with when that was by the clock of the machine; the states where there was no
    error."""

    error: str
    hit: str
    began: float
    ended: float
    states: dict[str, Tensor]


def train(engine: offload.Engine, steps: range) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses_of(engine, [batches(STEPS * ranks)[number * ranks + rank] for number in steps])


def meet(case: Case, folder: str) -> End:
    """The rank's program ends with the error, as programs do."""
    files, saved, began = FaultyFiles(), Path(folder) / "saved", 0.0
    error, states = "", {}

    def arm(verb: str) -> None:
        nonlocal began
        if verb == case.verb:
            dist.barrier()
            began = time.monotonic()
            if dist.get_rank() == case.rank:
                files.arm(case.call, case.kind, always=case.always)

    with pytest.MonkeyPatch.context() as patch, files.installed(patch):
        engine = offload.initialize(seeded(TinyLM), case.keys(Path(folder)))
    try:
        with engine:
            train(engine, range(SAVED))
            engine.save_checkpoint(saved)
            arm("save")
            engine.save_checkpoint(Path(folder) / "later")
            arm("step")
            train(engine, range(SAVED, STEPS))
            arm("load")
            engine.load_checkpoint(saved)
            train(engine, range(SAVED, STEPS))
            states = states_of(engine)
    except OffloadError as failure:
        error = f"{type(failure).__name__}: {failure}"
    ended = time.monotonic()
    files.release()
    return End(error, files.hit, began, ended, states)


@functools.cache
def expected(precision: str, ranks: int, stage: int) -> list[dict[str, Tensor]]:
    """The states at the save and at the end."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case("", "", 0, 0, ranks, stage, always=False, precision=precision)
        return run_ranks(ranks, Path(folder) / "ranks", without_faults, case, folder)[0]  # type: ignore[no-any-return]


def without_faults(case: Case, folder: str) -> list[dict[str, Tensor]]:
    keys = {**case.keys(Path(folder)), "placement": HOST}
    keys["budget"] = {"host": "64MiB"}
    states = []
    with offload.initialize(seeded(TinyLM), keys) as engine:
        for steps in (range(SAVED), range(SAVED, STEPS)):
            train(engine, steps)
            states.append(states_of(engine))
    return states


def check_saved(case: Case, folder: Path) -> None:
    """The checkpoint that is left loads on one rank, with the bits of the run."""
    states = expected(case.precision, case.ranks, case.stage)[0]
    keys = config(folder, HOST, precision=case.precision, clip_grad_norm=1.0)
    with offload.initialize(seeded(TinyLM, seed=3), keys) as engine:
        for name in ("saved", "later"):
            if name == "saved" or (folder / name).exists():
                engine.load_checkpoint(folder / name)
                assert_same_bits(states_of(engine), states)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_seed" in metafunc.fixturenames:
        many = metafunc.config.getoption("--long")
        metafunc.parametrize("case_seed", range(130) if many else SHORT)


def test_drawn_faults_leave_the_bits_or_an_error_on_all_ranks(
    tmp_path: Path, case_seed: int
) -> None:
    case = Case.drawn(case_seed)
    ends: list[End] = run_ranks(
        case.ranks, tmp_path / "ranks", meet, case, str(tmp_path), timeout_s=6 * MAX_S
    )
    hit = ends[case.rank].hit
    print(case, hit, [end.error for end in ends], sep="\n")
    if any(end.error for end in ends):
        assert case.kind in FATAL or case.always, hit
        assert all(end.error for end in ends)
        assert max(end.ended for end in ends) - min(end.began for end in ends) < MAX_S
        assert str(tmp_path) in ends[case.rank].error
        check_saved(case, tmp_path)
    else:
        for end in ends:
            assert_same_bits(end.states, expected(case.precision, case.ranks, case.stage)[1])
    ENDS[f"{case.verb}: {'no fault' if not hit else 'error' if ends[0].error else 'bits'}"] += 1
    print(ENDS)
