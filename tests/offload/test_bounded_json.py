"""JSON that anyone may have made takes no more memory than is known before it is parsed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.checkpoint.foreign.model_files import read_json
from offload.deepspeed.saved import LoopState, last_tag
from offload.errors import CheckpointError, ConfigError, StorageError
from offload.tools.memest.source.input_files import read_json as read_memest
from tests.offload.engine_cases import said_by
from tests.offload.test_checkpoint_forged import in_time

BOMBS = {
    "empty lists": b"[" + b"[]," * 19_000_000 + b"[]]",
    "empty objects": b"[" + b"{}," * 2_000_000 + b"{}]",
    "numbers": b'{"a": [' + b"1," * 28_000_000 + b"1]}",
    "keys": b"{" + b",".join(b'"%d":0' % n for n in range(2_000_000)) + b"}",
    "deep": b"[" * 60_000_000,
    "one text": b'"' + b"a" * (65 << 20) + b'"',
}


@pytest.fixture(params=BOMBS)
def bomb(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_bytes(BOMBS[request.param])
    return path


@pytest.mark.sample(3)
def test_a_bomb_is_refused_by_every_reader(bomb: Path) -> None:
    with in_time(), pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        read_json(bomb)
    with in_time(), pytest.raises(ConfigError):
        read_memest(bomb)


PROGRAM = """
import sys
from pathlib import Path
from offload.checkpoint.foreign.model_files import read_json
from offload.process.machine import peak_rss_nbytes
from offload.tiers.errors import CheckpointError
before = peak_rss_nbytes()
try:
    read_json(Path(sys.argv[1]))
except CheckpointError:
    print((peak_rss_nbytes() - before) >> 20)
"""


def test_a_bomb_takes_no_more_than_its_own_bytes(tmp_path: Path) -> None:
    """A configuration of 57 MB took 1.2 GiB."""
    path = tmp_path / "config.json"
    path.write_bytes(BOMBS["empty lists"])
    assert said_by(PROGRAM, str(path)) < 150


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "outside"])
def test_what_is_no_file_of_the_folder_is_not_read(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "config.json"
    (tmp_path / "secret").write_text("{}")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"loop": path, "outside": tmp_path / "secret"}[kind])
    with in_time(), pytest.raises((CheckpointError, StorageError)):
        read_json(path)


@pytest.mark.parametrize("tag", ["..", "../other", "/etc", "a/../../b", "", " ", "a\0b"])
def test_a_tag_is_a_folder_beside_the_file_that_names_it(tag: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="which is no folder beside it"):
        last_tag(tmp_path)


STATE = {
    "global_steps": 1, "global_samples": 2, "skipped_steps": 0, "lr_scheduler": {},
    "client_state": {},
}  # fmt: skip
WRONG = [
    {"global_steps": "x"}, {"global_steps": None},
    {"global_steps": float("inf")}, {"lr_scheduler": None}, {"client_state": 3},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_loops_state_that_was_made_up_is_refused(
    change: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="no complete state of a loop"):
        LoopState.read({**STATE, **change}, tmp_path)
    assert LoopState.read(STATE, tmp_path).global_samples == 2
