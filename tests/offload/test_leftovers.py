"""What dead processes left is found and removed, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import offload.checkpoint as checkpoints
from offload.checkpoint.foreign.model_files import pending_output
from offload.checkpoint.format.folder import PendingFolder
from offload.checkpoint.format.ownership import marked as marked_folder
from offload.cli.app import app
from offload.cli.doctor import check_path
from offload.memory.leftovers import clean, leftovers
from offload.swap.io.process_marks import Life, Maker, marked
from tests.offload.engine_cases import HOST, TinyLM, config, seeded, states_of
from tests.offload.plain_training import MakeEngine

REPOSITORY = Path(__file__).parents[2]

# A process that is killed with a swap file, an output of each kind and a text half written.
DYING = """
import os, sys
from contextlib import suppress
from pathlib import Path
from offload.checkpoint.foreign.model_files import pending_output
from offload.checkpoint.format.folder import PendingFolder
from offload.runs import metrics
from offload.swap.io.swap_file import SwapFile

os.O_TMPFILE = os.O_DIRECTORY  # as where it is not known
folder, unlink = Path(sys.argv[1]), os.unlink
def keep(*args, **keys): raise OSError(39, "kept")
os.unlink = keep  # as killed before it
with suppress(Exception):
    SwapFile(folder, direct=False)
os.unlink = unlink
file = pending_output(folder / "model.safetensors")
file.__enter__().write_bytes(bytes(70_000))
tree = pending_output(folder / "exported")
inner = tree.__enter__() / "inner"
inner.mkdir(parents=True)
(inner / "weights").write_bytes(bytes(5000))
(inner / "link").symlink_to(sys.argv[2])
checkpoint = PendingFolder(folder / "step-000003").__enter__()
os.fsync = lambda fd: os.kill(os.getpid(), 9)
metrics.write_whole(folder / "state.json", "text")
"""


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("precious")
    return folder


@pytest.fixture
def left(tmp_path: Path, victim: Path) -> Path:
    """A folder with what a killed process left in it, and files of others."""
    folder = tmp_path / "folder"
    folder.mkdir()
    died = subprocess.run(
        [sys.executable, "-c", DYING, str(folder), str(victim)], cwd=REPOSITORY, check=False
    )
    assert died.returncode == -signal.SIGKILL
    (folder / "state.json").write_text("older")
    return folder


def test_all_that_a_killed_process_left_is_removed_and_nothing_else(
    left: Path, victim: Path
) -> None:
    living = left / marked(".model.safetensors")
    living.write_text("being written")
    others = [left / "x.tmp-0123456789ab", left / ".state.json.tmp", left / f"{living.name}.bak"]
    for other in others:
        other.write_text("somebody else's")
    found = leftovers(left)
    stems = [each.path.name.partition(".tmp-")[0] for each in found]
    assert sorted(stems) == [
        ".exported", ".model.safetensors", ".state.json", "offload-swap", "step-000003",
    ]  # fmt: skip
    assert all(each.is_dead for each in found)
    assert sum(each.nbytes for each in found) >= 75_000
    assert {each.path for each in clean(left)} == {each.path for each in found}
    assert set(left.iterdir()) == {living, left / "state.json", *others}
    assert (victim / "file").read_text() == "precious"
    assert leftovers(left) == clean(left) == []


@pytest.mark.slow
def test_the_doctor_names_them_and_removes_them_on_request(left: Path) -> None:
    before = set(left.iterdir())
    (check,) = [c for c in check_path(left) if c.name.endswith("leftovers")]
    assert check.status == "warn"
    assert check.found.startswith("of dead runs: .exported.tmp-")
    assert check.advice == f"offload doctor --clean {left} removes them"
    runner = CliRunner()
    assert runner.invoke(app, ["doctor", "--clean"]).exit_code == 2
    assert set(left.iterdir()) == before
    done = runner.invoke(app, ["doctor", "--clean", str(left), "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr.count("removed") == 5
    listed = json.loads(done.stdout)["checks"]
    assert not [each for each in listed if each["name"].endswith("leftovers")]
    assert [each.name for each in left.iterdir()] == ["state.json"]
    again = runner.invoke(app, ["doctor", "--clean", str(left)])
    assert f"nothing of dead runs in {left}" in again.stderr


def test_what_living_processes_write_is_none(tmp_path: Path, make: MakeEngine) -> None:
    """A run in the same folder keeps every bit."""
    engine = make(seeded(TinyLM), config(tmp_path)["placement"])
    states = states_of(engine)
    with (
        pending_output(tmp_path / "out") as pending,
        PendingFolder(tmp_path / "checkpoint") as checkpoint,
    ):
        pending.write_text("half")
        assert leftovers(tmp_path) == clean(tmp_path) == []
        assert pending.exists()
        assert checkpoint.path.exists()
    assert (tmp_path / "out").read_text() == "half"
    assert all(states[name].equal(value) for name, value in states_of(engine).items())


def test_what_cannot_be_told_from_here_is_shown_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / marked(".out")
    path.touch()
    monkeypatch.setattr(Maker, "life", lambda self, is_local: Life.UNKNOWN)
    (found,) = leftovers(tmp_path)
    assert not found.is_dead
    (check,) = [c for c in check_path(tmp_path) if c.name.endswith("leftovers")]
    assert "of runs on other machines, in other containers, or before a restart" in check.found
    assert clean(tmp_path) == []
    assert path.exists()


def test_links_and_what_belongs_to_others_stay(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Maker, "life", lambda self, is_local: Life.DEAD)
    (tmp_path / marked("link")).symlink_to(victim)
    if os.geteuid() == 0:
        (tmp_path / marked("theirs")).touch()
        os.chown(next(tmp_path.glob("theirs*")), 12345, 12345)
    os.mkfifo(tmp_path / marked("pipe"))
    before = set(tmp_path.iterdir())
    assert leftovers(tmp_path) == clean(tmp_path) == []
    assert set(tmp_path.iterdir()) == before
    assert (victim / "file").exists()


def test_a_checkpoint_that_lacked_its_name_alone_gets_it(tmp_path: Path, make: MakeEngine) -> None:
    engine = make(seeded(TinyLM), HOST)
    saved = tmp_path / "saved"
    engine.save_checkpoint(saved / "step-000001")
    pending = marked_folder(saved / "step-000001", "tmp")
    (saved / "step-000001").rename(pending)  # its writer died before the last rename
    (found,) = leftovers(saved)
    assert found.pid is None
    clean(saved)
    assert checkpoints.latest(saved) == saved / "step-000001"
