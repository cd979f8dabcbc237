"""Each rank's random numbers and registered objects are its own, in one checkpoint."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload
from offload.errors import CheckpointError, OffloadError
from tests.offload.engine_cases import NVME, TinyLM, config, seeded
from tests.ranks.processes import heard, run_ranks
from tests.ranks.programs import BUDGET


class Position:
    """The position of a loader that reads one batch of every so many."""

    def __init__(self, at: int) -> None:
        self.at = torch.tensor(at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def made(folder: str, **objects: Any) -> offload.Engine:
    keys = config(Path(folder), NVME, budget=BUDGET, zero={"stage": 2})
    engine = offload.initialize(seeded(TinyLM), keys)
    engine.register_for_checkpointing(**objects)
    return engine


def save(folder: str) -> tuple[float, float, str, str]:
    """What each rank draws next; why another state is not saved, and what became of the old."""
    rank = dist.get_rank()
    alike, own = Position(5), Position(rank)
    with made(folder, alike=alike, own=own) as engine:
        torch.manual_seed(rank)
        random.seed(10 + rank)
        engine.save_checkpoint(Path(folder) / "saved", state={"rank": rank})
        drawn = float(torch.rand(())), random.random()
        told = ""
        try:  # on one rank alone
            state = {"bad": object()} if rank else {}
            engine.save_checkpoint(Path(folder) / "saved", state=state)
        except OffloadError as error:
            told = f"{type(error).__name__}: {error}"
        assert engine.load_checkpoint(Path(folder) / "saved") == {"rank": 0}
        stopped = ""
        with engine.stop_signals() as stop:
            stopped += str(stop())
        return (*drawn, told, stopped)


def load(folder: str) -> tuple[float, float, int, int]:
    alike, own = Position(0), Position(7)
    with made(folder, alike=alike, own=own) as engine:
        torch.manual_seed(99)
        assert engine.load_checkpoint(Path(folder) / "saved") == {"rank": 0}
        return float(torch.rand(())), random.random(), int(alike.at), int(own.at)


def load_on_more(folder: str) -> tuple[float, str, str]:
    """What this rank draws, what was said of it, and why its position is not known."""
    records = heard()
    with made(folder) as engine:
        torch.manual_seed(99)
        engine.load_checkpoint(Path(folder) / "saved")
        drawn = float(torch.rand(()))
        alike = Position(0)
        engine.register_for_checkpointing(alike=alike)
        engine.load_checkpoint(Path(folder) / "saved")  # a tensor that is the same on all ranks
        assert int(alike.at) == 5
        engine.register_for_checkpointing(own=Position(7))
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(Path(folder) / "saved")
    return drawn, "; ".join(text for text in records if "generators" in text), str(caught.value)


class Marks(nn.Module):
    """A module with a state of its own, which it may refuse to take back."""

    refuses = False

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise ValueError("not mine")


def load_what_one_refuses(folder: str) -> list[str]:
    model, saved, told = seeded(TinyLM), Path(folder) / "saved", []
    model.marks = Marks()
    keys = config(Path(folder), NVME, budget=BUDGET, zero={"stage": 2})
    with offload.initialize(model, keys) as engine:
        engine.save_checkpoint(saved)
        model.marks.refuses = dist.get_rank() == 1
        for attempt in (engine.load_checkpoint, engine.save_checkpoint):
            with pytest.raises(OffloadError) as caught:
                attempt(saved)
            told.append(f"{type(caught.value).__name__}: {caught.value}")
        model.marks.refuses = False
        engine.load_checkpoint(saved)
    return told


def test_where_one_ranks_modules_refuse_a_load_no_rank_goes_on(tmp_path: Path) -> None:
    for loading, saving in run_ranks(2, tmp_path, load_what_one_refuses, str(tmp_path)):
        assert loading.startswith("CheckpointError: ")
        assert "not mine" in loading
        assert saving.startswith("StateError: loading ")


def test_each_rank_goes_on_with_its_own_state(tmp_path: Path) -> None:
    saved = run_ranks(2, tmp_path, save, str(tmp_path))
    loaded = run_ranks(2, tmp_path, load, str(tmp_path))
    for rank, (torch_drew, python_drew, told, stopped) in enumerate(saved):
        assert loaded[rank] == (torch_drew, python_drew, 5, rank)
        assert "state holds builtins.object" in told
        assert told.startswith("UnsupportedError" if rank else "CheckpointError: no checkpoint was")
        assert stopped == "False"
    more = run_ranks(3, tmp_path, load_on_more, str(tmp_path))
    torch.manual_seed(99)
    assert [drawn for drawn, _, _ in more] == [saved[0][0], saved[1][0], float(torch.rand(()))]
    assert [bool(said) for _, said, _ in more] == [False, False, True]
    assert "of rank 2: they go on as they are" in more[2][1]
    assert all("own has another state on each of the 2 ranks" in why for _, _, why in more)
