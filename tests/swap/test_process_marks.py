"""Names that say which process made what they name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from offload.swap.io.process_marks import Life, Maker, maker_of, marked

NOBODY = 1 << 30  # more than a pid can be


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc in which this process is 7 ticks old, and process 41 began at tick 500."""
    for pid, ticks, name in ((os.getpid(), 7, "python"), (41, 500, "a) 3 (b")):
        folder = tmp_path / str(pid)
        folder.mkdir()
        fields = ["S", *(str(number) for number in range(4, 22)), str(ticks), "23"]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026531836]")
    return tmp_path


def test_a_name_says_who_made_it() -> None:
    name = marked(".model.safetensors")
    assert name.startswith(".model.safetensors.tmp-")
    assert maker_of(name) == Maker.here()
    assert marked("x") != marked("x")
    assert Maker.here().life(is_local=True) is Life.ALIVE


def test_no_other_name_is_taken_for_one() -> None:
    name = marked("x")
    for other in ("x", "x.tmp-0123456789ab", f"{name}0", name.rpartition("-")[0]):
        assert maker_of(other) is None, other


def test_a_pid_that_is_used_again_is_another_process(proc: Path) -> None:
    here = Maker.here(proc)
    assert here == Maker("01234567", 4026531836, os.getpid(), 7)
    other = replace(here, pid=41, ticks=500)
    assert other.life(is_local=True, proc=proc) is Life.ALIVE
    assert replace(other, ticks=499).life(is_local=True, proc=proc) is Life.DEAD
    assert replace(other, pid=NOBODY).life(is_local=True, proc=proc) is Life.DEAD


def test_what_cannot_be_seen_from_here_is_not_dead(proc: Path) -> None:
    gone = replace(Maker.here(proc), pid=NOBODY)
    assert replace(gone, space=1).life(is_local=True, proc=proc) is Life.UNKNOWN  # a container
    assert replace(gone, ticks=0).life(is_local=True, proc=proc) is Life.UNKNOWN
    elsewhere = replace(gone, boot="89abcdef")  # another machine, or before a restart
    assert replace(elsewhere, boot="0" * 8).life(is_local=True, proc=proc) is Life.UNKNOWN
    assert replace(gone, pid=1).life(is_local=True, proc=proc) is Life.UNKNOWN  # hidden
    assert elsewhere.life(is_local=False, proc=proc) is Life.UNKNOWN
    assert elsewhere.life(is_local=True, proc=proc) is Life.DEAD
    assert Maker.here(proc / "nothing").life(is_local=True, proc=proc / "nothing") is Life.UNKNOWN
