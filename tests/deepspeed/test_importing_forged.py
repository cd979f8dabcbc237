"""A forged checkpoint of DeepSpeed is imported or refused: with a typed error, and
nothing of it is run."""

import copy
import io
import os
import shutil
import zipfile
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
from tests.offload.json_changes import changed, changes
from tests.offload.test_checkpoint_forged import in_time

pytestmark = pytest.mark.sample(4)

STATES, MODEL = "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
BY_HAND = {
    "global": b"cos\nmkdir\n(Vrun\ntR.",
    "inst": b"(Vrun\nios\nmkdir\n.",
    "obj": b"(cos\nmkdir\nVrun\no.",
    "newobj": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x03run\x85\x81.",
    "build of a class": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93}\x8c\x01aK\x01sb.",
    "call of a call": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93)R)R.",
    "getattr": b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",
    "dotted": b"\x80\x04\x8c\x02os\x8c\x0bpath.exists\x93\x8c\x03run\x85R.",
    "dotted in torch": b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.",
    "nothing": b"",
    "no stop": b"\x80\x04K\x01",
    "append to a number": b"\x80\x04K\x01K\x02a.",
    "unknown opcode": b"\x80\x04\xff.",
    "no utf-8": b"\x80\x04\x8c\x02\xff\xfe.",
    "a number": b"\x80\x04K\x01.",
}


def archive(data_pkl: bytes, files: dict[str, bytes] | None = None, **how: Any) -> bytes:
    """As `torch.save` writes one, of any pickle."""
    all_files = {"data.pkl": data_pkl, "byteorder": b"little", "version": b"3", **(files or {})}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as file:
        for name, content in all_files.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "x"
    zero_files.write(folder, *trained(), 2, 1, epoch=1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "x"))


def survives(folder: Path) -> bool:
    out = folder.parent / "out"
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
        import_checkpoint(tmp_path / "sub", tmp_path / "out", kind="adamw")


def at_random(long: bool) -> settings:
    count = 1000 if long else 40
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", [STATES, MODEL])
def test_values_at_random(folder: Path, name: str, long: bool) -> None:
    content = torch.load(folder / name, weights_only=False)
    counts = {True: 0, False: 0}

    @at_random(long)
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

    @at_random(long)
    @given(st.lists(change, min_size=1, max_size=3))
    def check(made: list[tuple[int, bytes]]) -> None:
        raw = bytearray(original)
        for at, content in made:
            raw[at : at + len(content)] = content
        (folder / name).write_bytes(raw)
        survives(folder)

    check()
