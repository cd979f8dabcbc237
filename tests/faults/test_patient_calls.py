"""No file of a checkpoint is asked for but by a hand: a disk or a server that does not answer keeps
no thread of the program."""

from __future__ import annotations

import builtins
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload import checkpoint
from offload.checkpoint.foreign.exporting import export
from offload.errors import CheckpointError, PathError
from offload.integrations import streamed_folder
from offload.swap.io.hands import patiently
from tests.stuck_calls import HAND

_OF_OS = (
    "open", "stat", "lstat", "fstat", "access", "readlink", "scandir", "listdir", "statvfs",
    "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "truncate",
    "ftruncate", "fsync", "fdatasync", "pread", "preadv", "pwrite", "posix_fadvise", "utime",
    "chmod", "sendfile",
)  # fmt: skip


@contextmanager
def by_hands_alone(folder: Path) -> Iterator[list[str]]:
    """Inside, a call about what is at or below `folder` that a hand does not make is noted."""
    noted: list[str] = []

    def is_below(what: Any) -> bool:
        try:
            if isinstance(what, int) and not isinstance(what, bool):
                what = os.readlink(f"/proc/self/fd/{what}")
            path = os.path.abspath(os.fsdecode(what))
        except (TypeError, OSError, ValueError):
            return False
        return Path(path).is_relative_to(folder)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keys: Any) -> Any:
            if threading.current_thread().name != HAND and not getattr(own, "looks", False):
                own.looks = True
                try:
                    if any(is_below(each) for each in (*args[:2], *keys.values())):
                        noted.append(f"{name}{args}")
                finally:
                    own.looks = False
            return function(*args, **keys)

        return call

    own = threading.local()
    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_OS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        patch.setattr(builtins, "open", watched("open", open))
        patch.setattr(io, "open", watched("open", io.open))
        yield noted


@pytest.fixture(scope="module")
def engine() -> Iterator[offload.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    where = {"parameters": "host", "gradients": "host", "optimizer": "host"}
    with offload.initialize(model, {"device": "cpu", "placement": where}) as engine:
        yield engine


def test_it_notes_what_no_hand_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with by_hands_alone(folder) as noted:
        (folder / "x").write_text("x")
        (folder / "x").exists()
        assert not (tmp_path / "y").exists()
        with os.scandir(folder) as found:
            list(found)
        os.path.islink(folder / "x")
        patiently("stat", folder, os.stat, folder)
    assert [each.partition("(")[0] for each in noted] == ["open", "stat", "scandir", "lstat"]


def test_saves_loads_and_what_is_removed(tmp_path: Path, engine: offload.Engine) -> None:
    folder = tmp_path / "run"
    with by_hands_alone(folder) as noted:
        for number in (1, 2, 3):
            engine.save_checkpoint(checkpoint.step_path(folder, number), state={"number": number})
        engine.save_checkpoint(checkpoint.step_path(folder, 3), wait=False)
        engine.checkpoint_saved()
        found = checkpoint.latest(folder)
        assert found is not None
        engine.load_checkpoint(found)
        assert len(checkpoint.prune(folder, 1)) == 2
    assert not noted


def test_what_is_no_checkpoint(tmp_path: Path, engine: offload.Engine) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "file").write_bytes(b"PK\x03\x04")
    (folder / "of others").mkdir()
    (folder / "of others/x.pt").touch()
    with by_hands_alone(folder) as noted:
        for name in ("file", "of others", "none", "file/below"):
            with pytest.raises(CheckpointError):
                engine.load_checkpoint(folder / name)
        for name in ("file", "of others"):
            with pytest.raises(PathError):
                engine.save_checkpoint(folder / name)
        assert checkpoint.latest(folder) is None
        assert checkpoint.prune(folder, 1) == []
    assert not noted


def test_what_others_save(tmp_path: Path, engine: offload.Engine) -> None:
    """A loop of DeepSpeed's, and a folder of Lightning's."""
    model = nn.Linear(3, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    loop, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    with by_hands_alone(tmp_path) as noted:
        for _ in range(2):
            loop.save_checkpoint(tmp_path / "loop", tag="best", client_state={"epoch": 1})
            loop.load_checkpoint(tmp_path / "loop", tag="best")
        for _ in range(2):
            streamed_folder.save(engine, tmp_path / "x.ckpt", {"epoch": 1}, str, writes=True)
    loop.destroy()
    assert not noted


def test_what_is_made_of_a_checkpoint(tmp_path: Path, engine: offload.Engine) -> None:
    engine.save_checkpoint(tmp_path / "saved")
    with by_hands_alone(tmp_path) as noted:
        export(tmp_path / "saved", tmp_path / "x.safetensors")
        export(tmp_path / "saved", tmp_path / "exported")
        checkpoint.copy(tmp_path / "saved", "memory://patient")
        checkpoint.copy("memory://patient", tmp_path / "back")
    # a store has a library of its own, which reads the files that go there
    assert not [each for each in noted if not re.search(r"/saved/.*\.safetensors'", each)]
