"""Whatever happens while a checkpoint is written, a complete one is there afterwards."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import checkpoint
from offload.checkpoint.engine import saving
from offload.checkpoint.format import folder as folders
from offload.checkpoint.format import writer
from offload.checkpoint.format.folder import pending_name
from offload.checkpoint.format.reader import CheckpointReader
from offload.errors import NoSpaceError, PathError
from tests.offload.checkpoint_crash import KEYS, Request, bits_of, step_of
from tests.offload.engine_cases import HOST, TinyLM, batches, config, seeded
from tests.offload.engine_states import losses_of

REPOSITORY = Path(__file__).parents[2]


class Victim:
    """The process of `checkpoint_crash`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = 0
        self.bits: dict[int, int] = {}  # of the steps that were saved since `start`

    def start(self, path: Path, swap: Path, **keys: Any) -> int:
        """Run a child; the step that it found in the checkpoint. `keys`: of its `Request`."""
        request = Request(str(path), str(swap), **keys)
        self.bits = {}
        assert self._process.stdin is not None
        self._process.stdin.write(request.to_json() + "\n")
        self._process.stdin.flush()
        lines = [self.read(), self.read()]  # in either order
        self.pid = int(next(words[1] for words in lines if words[0] == "pid"))
        loaded = [words for words in lines if words[0] == "loaded"]
        assert loaded, lines
        return int(loaded[0][1])

    def read(self) -> list[str]:
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split(maxsplit=1)
        assert words, "the process ended"
        assert words[0] != "failed", words
        if words[0] == "saved":
            step, bits = words.pop().split()
            self.bits[int(step)] = int(bits)
            words.append(step)
        return words

    def end(self) -> dict[str, int]:
        """The last number of each kind of line, until the child has ended."""
        numbers: dict[str, int] = {}
        while "ended" not in numbers:
            kind, number = self.read()
            numbers[kind] = int(number)
        return numbers


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.offload.checkpoint_crash"], cwd=REPOSITORY, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with process:
        yield Victim(process)
        process.kill()


def test_killed_at_any_moment_a_save_leaves_a_checkpoint_that_loads(
    victim: Victim, tmp_path: Path, long: bool
) -> None:
    path = tmp_path / "checkpoints" / "saved"
    draw = random.Random(0)
    step = 0
    for number in range(15 if long else 2):
        begun = victim.start(path, tmp_path, fresh=number == 0)
        assert begun in (step, step + 1), "neither the old nor the new one"
        step = begun
        if number == 0:
            assert victim.read() == ["saved", "1"]
            step = 1
        time.sleep(draw.uniform(0, 0.06))
        os.kill(victim.pid, signal.SIGKILL)
        ended = victim.end()
        assert ended["ended"] == signal.SIGKILL
        step = ended.get("saved", step)
    assert path.is_dir()
    victim.start(path, tmp_path, stop_at=-1)
    victim.end()
    assert os.listdir(path.parent) == ["saved"], "the next save clears up"


@pytest.mark.sample("one folder")
@pytest.mark.parametrize(
    "how", [{}, {"exchange": False}, {"keep": 2}], ids=["one folder", "no exchange", "steps"]
)
def test_killed_before_each_system_call_of_a_save_and_of_what_removes_old_ones(
    victim: Victim, tmp_path: Path, how: dict[str, Any], long: bool
) -> None:
    path = tmp_path / "checkpoints" / "saved"
    victim.start(path, tmp_path, fresh=True, stop_at=-1, **how)
    victim.end()
    for _ in range(2):  # the second removes an old step
        victim.start(path, tmp_path, stop_at=-1, **how)
        ended = victim.end()
        step, calls = ended["saved"], ended["calls"]
    # from the fsync of the manifest to the removal of what was replaced
    for stop_at in range(calls) if long else [0, 1, 2, calls // 3, *range(calls - 28, calls, 6)]:
        begun = victim.start(path, tmp_path, stop_at=stop_at, **how)
        assert begun in (step, step + 1), "neither the old nor the new one"
        step = begun
        assert victim.end()["ended"] == signal.SIGKILL
    assert victim.start(path, tmp_path, stop_at=-1, **how) in (step, step + 1)
    step = victim.end()["saved"]
    assert os.listdir(path.parent) == ["saved"]
    if "keep" in how:
        names = [checkpoint.step_path(path, number).name for number in (step - 1, step)]
        assert sorted(os.listdir(path)) == names


@pytest.mark.slow
def test_killed_between_a_speculative_update_and_its_step_a_run_goes_on_to_the_same_bits(
    victim: Victim, tmp_path: Path, long: bool
) -> None:
    """Each child saves twice at most. What its second step speculated counts or is undone, and
    it is killed at one of the events of that, of the files or of the save."""
    path, draw = tmp_path / "checkpoints" / "saved", random.Random(0)
    victim.start(path, tmp_path, fresh=True, speculative=True, stop_at=-1)
    ended, step, killed = victim.end(), 2, 0
    assert ended["speculated"] > 0
    for _ in range(60 if long else 5):
        stop_at = draw.randrange(ended["calls"])
        begun = victim.start(path, tmp_path, speculative=True, stop_at=stop_at)
        assert begun in (step, step + 1), "neither the old nor the new one"
        status = victim.end()
        killed += status["ended"] == signal.SIGKILL
        step = status.get("saved", begun)
    assert killed > 2
    victim.start(path, tmp_path, speculative=True, stop_at=-1)
    assert victim.end()["speculated"] > 0
    assert os.listdir(tmp_path) == ["checkpoints"], "swap files go with their process"
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST, **KEYS)) as engine:
        for _ in range(max(victim.bits)):  # uninterrupted, and nothing is speculative
            step_of(engine)
        engine.save_checkpoint(tmp_path / "uninterrupted")
        assert not engine.report().trials.kept
    assert bits_of(tmp_path / "uninterrupted") == victim.bits[max(victim.bits)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[offload.Engine]:
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as engine:
        yield engine


def checkpoints_of(engine: offload.Engine, folder: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        losses_of(engine, batches(1))
        engine.save_checkpoint(checkpoint.step_path(folder, step))


def test_a_complete_leftover_is_adopted_where_its_name_is_missing(
    engine: offload.Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    checkpoints_of(engine, folder, 2)
    (folder / "step-000002").rename(pending_name(folder / "step-000002"))
    (folder / "step-000001").rename(pending_name(folder / "step-000001"))
    assert checkpoint.latest(folder) == folder / "step-000002"
    assert sorted(os.listdir(folder)) == ["step-000001", "step-000002"]
    (folder / "step-000002").rename(pending_name(folder / "step-000002"))
    engine.load_checkpoint(folder / "step-000002")


def test_of_two_complete_leftovers_the_new_one_is_adopted(
    engine: offload.Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    checkpoints_of(engine, folder, 2)
    (folder / "step-000002").rename(pending_name(folder / "saved"))
    (folder / "step-000001").rename(pending_name(folder / "saved"))
    engine.load_checkpoint(folder / "saved")
    assert engine.report().steps == 2
    assert os.listdir(folder) == ["saved"]


def test_torn_leftovers_are_removed_and_other_files_stay(
    engine: offload.Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    checkpoints_of(engine, folder, 1)
    torn = Path(shutil.copytree(folder / "step-000001", pending_name(folder / "step-000002")))
    (torn / "buffers.safetensors").unlink()
    foreign = pending_name(folder / "notes")
    foreign.mkdir()
    (foreign / "diary.txt").write_text("dear diary")
    assert checkpoint.latest(folder) == folder / "step-000001"
    assert sorted(os.listdir(folder)) == [foreign.name, "step-000001"]


def test_a_folder_that_somebody_is_writing_is_left_alone(
    engine: offload.Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    checkpoints_of(engine, folder, 2)
    written = (folder / "step-000002").rename(pending_name(folder / "step-000002"))
    fd = os.open(written, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert checkpoint.latest(folder) == folder / "step-000001"
    engine.save_checkpoint(folder / "step-000001")
    assert written.is_dir()
    os.close(fd)
    assert checkpoint.latest(folder) == folder / "step-000002"


def test_a_load_of_what_a_save_replaces_meanwhile_is_an_error_and_never_a_mixture(
    engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    losses_of(engine, batches(1))
    engine.save_checkpoint(path)
    with offload.initialize(seeded(TinyLM, 2), config(tmp_path, HOST)) as other:
        read_into, begun = CheckpointReader.read_into, []

        def read(*args: Any) -> None:
            if not begun:
                begun.append(True)
                losses_of(engine, batches(1))
                engine.save_checkpoint(path)
            read_into(*args)

        monkeypatch.setattr(CheckpointReader, "read_into", read)
        with pytest.raises(offload.CheckpointError, match="is missing"):
            other.load_checkpoint(path)
        monkeypatch.undo()
        other.load_checkpoint(path)
        assert other.report().steps == 2


def test_latest_passes_over_what_is_torn_and_says_so(
    engine: offload.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    assert checkpoint.latest(folder) is None
    checkpoints_of(engine, folder, 3)
    (folder / "step-000003" / "manifest.json").unlink()
    (folder / "step-000002" / "optimizer" / "001.safetensors").write_bytes(b"")
    (folder / "step-9.json").write_text("{}")
    assert checkpoint.latest(folder) == folder / "step-000001"
    assert "passed over" in caplog.text


def test_what_is_no_checkpoint_is_never_replaced(engine: offload.Engine, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("")
    with pytest.raises(PathError, match=r"holds thesis\.tex, which is not part of a checkpoint"):
        engine.save_checkpoint(precious)
    with pytest.raises(PathError, match="is a file"):
        engine.save_checkpoint(precious / "thesis.tex")
    with pytest.raises(PathError, match="cannot write a checkpoint"):
        engine.save_checkpoint(precious / "thesis.tex" / "saved")
    assert os.listdir(precious) == ["thesis.tex"]


def test_an_empty_folder_and_a_link_are_saved_to(engine: offload.Engine, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    engine.save_checkpoint(link)
    assert link.is_symlink()
    engine.load_checkpoint(target)
    engine.save_checkpoint(link)
    engine.load_checkpoint(link)


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(
    engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "saved"
    engine.save_checkpoint(path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saving.Saver, "write_group", interrupted)
    losses_of(engine, batches(1))
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(path)
    assert os.listdir(path.parent) == ["saved"]
    engine.load_checkpoint(path)
    assert engine.report().steps == 0


def test_without_an_exchange_of_names_a_failing_rename_is_undone(
    engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "saved"
    engine.save_checkpoint(path)
    rename, before = os.rename, (path / "manifest.json").read_text()

    def failing(a: Path, b: Path) -> None:
        if ".tmp-" in str(a) and (Path(a) / "manifest.json").read_text() != before:
            raise OSError(5, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(folders, "exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(offload.StorageError, match="EIO"):
        engine.save_checkpoint(path)
    monkeypatch.undo()
    assert os.listdir(path.parent) == ["saved"]
    engine.load_checkpoint(path)


@contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("noticed", ["before", "while writing"])
def test_a_full_disk_is_named_and_the_old_checkpoint_stays(
    engine: offload.Engine, tmp_path: Path, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if noticed == "while writing":
        monkeypatch.setattr(writer, "check_room", lambda *_: None)
    with small_disk(tmp_path / "disk", 480 << 10) as disk:
        engine.save_checkpoint(disk / "saved")
        losses_of(engine, batches(1))
        with pytest.raises(NoSpaceError, match=r"free space|are free; free .* there") as caught:
            engine.save_checkpoint(disk / "saved")
        assert "\n" not in str(caught.value)
        assert str(disk) in str(caught.value)
        assert os.listdir(disk) == ["saved"]
        losses_of(engine, batches(1))  # the engine is as good as before
        engine.load_checkpoint(disk / "saved")
        assert engine.report().steps == 0
