"""A checkpoint of DeepSpeed that somebody made up is imported or refused: with a typed error, and
nothing of it is run."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.deepspeed.importing import import_checkpoint
from offload.errors import CheckpointError, OffloadError
from tests.deepspeed import zero_files
from tests.deepspeed.test_importing import trained
from tests.offload.forged_dcp import archive
from tests.offload.json_changes import changed, changes
from tests.offload.test_checkpoint_forged import in_time
from tests.offload.test_dcp_forged import BY_HAND

pytestmark = pytest.mark.sample(4)

STATES, MODEL = "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "x"
    zero_files.write(folder, *trained(), 2, 1, epoch=1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "x"))


def survives(folder: Path) -> bool:
    out = folder.parent / "ours"
    with in_time():
        try:
            import_checkpoint(folder, out, kind="adamw")
        except OffloadError as error:
            assert "\n" not in str(error)  # noqa: PT017 - or it was imported
            assert not (out / "x").exists()
            return False
    shutil.rmtree(out)
    return True


@pytest.mark.parametrize("name", [STATES, MODEL])
@pytest.mark.parametrize("raw", BY_HAND.values(), ids=BY_HAND)
def test_a_pickle_by_hand_is_refused(
    folder: Path, raw: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)  # where it would make a folder
    (folder / name).write_bytes(archive(raw))
    assert not survives(folder)
    assert not (folder.parent / "run").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "outside", "empty", "missing"])
@pytest.mark.parametrize("name", [STATES, MODEL])
def test_files_that_are_no_files_are_refused(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    outside = path.rename(folder.parent / "outside")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("loop", "outside"):
        path.symlink_to({"loop": path, "outside": outside}[kind])
    elif kind == "empty":
        path.touch()
    assert not survives(folder)


def test_a_latest_that_leads_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/latest").write_text("../x")
    with pytest.raises(CheckpointError, match="no folder beside it"):
        import_checkpoint(tmp_path / "sub", tmp_path / "ours", kind="adamw")


@pytest.mark.parametrize("name", [STATES, MODEL])
def test_values_at_random(folder: Path, name: str, long: bool) -> None:
    content = torch.load(folder / name, weights_only=False)
    counts = {True: 0, False: 0}

    @settings(
        max_examples=1000 if long else 40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(changes())
    def check(made: Any) -> None:
        torch.save(changed(copy.deepcopy(content), made), folder / name)
        counts[survives(folder)] += 1

    check()
    assert min(counts.values()) > 0, counts


@pytest.mark.parametrize("name", [STATES, MODEL])
def test_bytes_at_random(folder: Path, name: str, long: bool) -> None:
    original = (folder / name).read_bytes()
    change = st.tuples(st.integers(0, len(original) - 1), st.binary(max_size=9))

    @settings(
        max_examples=1000 if long else 30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(change, min_size=1, max_size=3))
    def check(made: list[tuple[int, bytes]]) -> None:
        raw = bytearray(original)
        for at, content in made:
            raw[at : at + len(content)] = content
        (folder / name).write_bytes(raw)
        survives(folder)

    check()
