"""`state.ckpt` of a folder that somebody may have sent: read as data alone."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import CheckpointError
from offload.integrations import streamed_folder


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_no_code_unless_it_is_trusted(tmp_path: Path) -> None:
    bomb, file = tmp_path / "it went off", tmp_path / "state.ckpt"
    torch.save({"epoch": 1, "hyper_parameters": Bomb(bomb)}, file)
    with pytest.raises(CheckpointError, match=r"runs code that it names.*pass\s+trust=True"):
        streamed_folder.load_state(file, trust=False)
    assert not bomb.exists()
    streamed_folder.load_state(file, trust=True)
    assert bomb.exists()


def test_tensors_and_plain_values_need_no_trust(tmp_path: Path) -> None:
    state = {"epoch": 1, "best": torch.ones(2), "loops": {"a": [1.0, None, "x"]}}
    torch.save(state, tmp_path / "state.ckpt")
    found = streamed_folder.load_state(tmp_path / "state.ckpt", trust=False)
    assert torch.equal(found.pop("best"), torch.ones(2))
    assert found == {"epoch": 1, "loops": {"a": [1.0, None, "x"]}}


def test_what_is_no_state_is_an_error(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "state.ckpt")
    with pytest.raises(CheckpointError, match="holds a list, no state"):
        streamed_folder.load_state(tmp_path / "state.ckpt", trust=False)
    whole = (tmp_path / "state.ckpt").read_bytes()
    for damaged in (b"", b"\x80\x02nonsense", whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        (tmp_path / "state.ckpt").write_bytes(damaged)
        for trust in (False, True):
            with pytest.raises(CheckpointError, match=r"state\.ckpt"):
                streamed_folder.load_state(tmp_path / "state.ckpt", trust=trust)


@pytest.mark.parametrize("name", ["../outside", "/etc", "states-0123456", None])
def test_states_outside_of_the_folder_are_not_named(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "epoch=0.ckpt"
    folder.mkdir()
    torch.save({"offload_states": name} if name else {}, folder / "state.ckpt")
    with pytest.raises(CheckpointError, match=re.escape("is missing, which")):
        streamed_folder.read(folder, lambda path: torch.load(path, weights_only=True))
