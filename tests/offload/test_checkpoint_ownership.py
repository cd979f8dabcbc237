"""What a checkpoint's own names are is replaced or removed; everything else stays."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import checkpoint
from offload.checkpoint.format import disk
from offload.checkpoint.format.disk import lock_folder, unlock
from offload.checkpoint.format.folder import discard, pending_name, recover, remove
from offload.errors import PathError
from tests.offload.engine_cases import HOST, TinyLM, config, seeded


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    keys = config(tmp_path_factory.mktemp("swap"), HOST)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        yield engine


@pytest.fixture(scope="module")
def original(engine: offload.Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "saved"
    engine.save_checkpoint(path)
    return path


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink()
        else path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }  # fmt: skip


def before_calls(patch: pytest.MonkeyPatch, act: Callable[[str, Path], object]) -> None:
    """Do `act(operation, path)` before each call on a file system."""
    perform = disk.perform

    def acting(operation: str, path: Path, *call: Any) -> Any:
        act(operation, path)
        return perform(operation, path, *call)

    patch.setattr(disk, "perform", acting)


def written(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"precious {name}")
    return folder


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["optimizer/thesis.tex", "parameters/sweep.csv"], "optimizer/thesis.tex, parameters/sw"),
        (["manifest.json"], "manifest.json that is not one of offload's"),
        (["manifest.json", "buffers.safetensors"], "manifest.json that is not one of offload's"),
        (["parameters/000.safetensors"], "parameters"),
        (["buffers.safetensors"], "buffers.safetensors"),
        (["parameters"], "parameters"),
        ([".hidden"], ".hidden"),
        (["optimizer/deep/down/notes.txt"], "optimizer/deep"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_a_foreign_folder_with_a_checkpoints_names_in_it_is_refused_and_kept(
    engine: offload.Engine, tmp_path: Path, files: list[str], named: str
) -> None:
    target = written(tmp_path / "work", *files)
    before = tree(tmp_path)
    with pytest.raises(PathError) as caught:
        engine.save_checkpoint(target)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == before


def put_file(path: Path) -> None:
    written(path, "optimizer/thesis.tex")


def put_link(path: Path) -> None:
    (path / "parameters" / "000.safetensors").unlink()
    (path / "parameters" / "000.safetensors").symlink_to(path.parent / "elsewhere")


def put_linked_folder(path: Path) -> None:
    shutil.move(path / "optimizer", path.parent / "elsewhere")
    (path / "optimizer").symlink_to(path.parent / "elsewhere")


def edit_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"steps_taken": 0', '"steps_taken": 1'))


def drop_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put_file, "optimizer/thesis.tex"),
        (put_link, "parameters/000.safetensors"),
        (put_linked_folder, "optimizer"),
        (edit_manifest, "manifest.json"),
        (drop_manifest, "buffers.safetensors"),
    ],
)
def test_a_checkpoint_with_something_else_in_it_is_neither_replaced_nor_pruned(
    engine: offload.Engine, original: Path, tmp_path: Path, change: Callable[[Path], None],
    named: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for step in (1, 2):
        shutil.copytree(original, checkpoint.step_path(tmp_path, step))
    path = checkpoint.step_path(tmp_path, 1)
    change(path)
    before = tree(tmp_path)
    with pytest.raises(PathError) as caught:
        engine.save_checkpoint(path)
    assert named in str(caught.value)
    with pytest.raises(PathError):
        discard(path)
    with caplog.at_level(logging.WARNING, "offload"):
        assert checkpoint.prune(tmp_path, keep_last=1) == []
    assert "not removed" in caplog.text
    assert tree(tmp_path) == before


def test_what_comes_into_the_folder_during_the_save_is_kept(
    engine: offload.Engine, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.checkpoint.format.writer import CheckpointWriter

    path = Path(shutil.copytree(original, tmp_path / "saved"))
    before = tree(path)
    finish = CheckpointWriter.finish

    def finishing(files: CheckpointWriter) -> None:
        finish(files)
        written(path, "notes.txt")

    monkeypatch.setattr(CheckpointWriter, "finish", finishing)
    with pytest.raises(PathError, match=r"notes\.txt"):
        engine.save_checkpoint(path)
    assert os.listdir(tmp_path) == ["saved"]
    assert tree(path) == {**before, "notes.txt": b"precious notes.txt"}


def test_the_root_a_mount_and_names_that_no_folder_can_have_are_refused(
    engine: offload.Engine, tmp_path: Path
) -> None:
    for path in ("/", "/proc", tmp_path / "a\0b", tmp_path / ("n" * 300), "/dev/null/x"):
        with pytest.raises(PathError):
            engine.save_checkpoint(path)
        with pytest.raises(offload.CheckpointError):
            engine.load_checkpoint(path)
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_where_a_disk_is_mounted_is_refused_before_anything_is_written(
    engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "disk")
    with pytest.raises(PathError, match="where a disk is mounted; name a folder in it"):
        engine.save_checkpoint(tmp_path / "disk")
    assert os.listdir(tmp_path) == ["disk"]


def test_a_name_that_another_process_gives_first_is_replaced(
    engine: offload.Engine, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"

    def another_first(operation: str, of: Path) -> None:
        if operation == "rename" and not path.exists():
            shutil.copytree(original, path)

    before_calls(monkeypatch, another_first)
    engine.save_checkpoint(path)
    assert os.listdir(tmp_path) == ["saved"]
    assert tree(path) != tree(original)
    engine.load_checkpoint(path)


@pytest.mark.parametrize(("before", "count"), [("scandir", 2), ("scandir", 7), ("exchange", 1)])
def test_what_another_process_removes_during_the_save_is_no_error(
    engine: offload.Engine, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    before: str, count: int,
) -> None:  # fmt: skip
    path = Path(shutil.copytree(original, tmp_path / "saved"))
    seen: list[Path] = []

    def another_first(operation: str, of: Path) -> None:
        seen.extend([of] if operation == before else [])
        if len(seen) == count and operation == before:
            shutil.rmtree(path, ignore_errors=True)

    before_calls(monkeypatch, another_first)
    engine.save_checkpoint(path)
    assert len(seen) >= count
    assert os.listdir(tmp_path) == ["saved"]
    engine.load_checkpoint(path)


@pytest.mark.parametrize("kind", ["old", "tmp", "del"])
@pytest.mark.parametrize("digits", [12, 30])
def test_a_sibling_with_such_a_name_stays(
    engine: offload.Engine, original: Path, tmp_path: Path, kind: str, digits: int
) -> None:
    number = ("0123456789ab" * 3)[:digits]
    written(tmp_path / f"backup.{kind}-{number}", "optimizer/000.safetensors", "manifest.json")
    (tmp_path / f"empty.{kind}-{number}").mkdir()
    shutil.copytree(original, tmp_path / "mine")
    shutil.copytree(original, tmp_path / f"mine.{kind}-{number}")  # put aside by hand
    before = tree(tmp_path)
    recover(tmp_path)
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    assert tree(tmp_path) == before


def test_a_complete_leftover_that_may_not_be_renamed_stops_no_save(
    engine: offload.Engine, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is another user's, in a folder with the sticky bit."""
    theirs = pending_name(tmp_path / "theirs")
    shutil.copytree(original, theirs)

    def refused(operation: str, path: Path) -> None:
        if operation == "rename" and path.name == "theirs":
            raise PermissionError(errno.EPERM, "Operation not permitted")

    before_calls(monkeypatch, refused)
    engine.save_checkpoint(tmp_path / "step-000001")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    assert f"{theirs} stays: " in caplog.text
    assert theirs.is_dir()


@pytest.mark.parametrize("inner", ["parameters", "optimizer"])
def test_a_link_that_takes_a_name_amid_a_removal_is_not_followed(
    original: Path, tmp_path: Path, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = pending_name(tmp_path / "saved")
    shutil.copytree(original, tmp_path / "saved")
    shutil.copytree(original, doomed)
    precious = Path(shutil.copytree(original / inner, tmp_path / "precious"))
    before, swapped = tree(precious), []

    def exchanged(operation: str, path: Path) -> None:
        if operation == "rmtree" and not swapped:  # after all was looked at
            swapped.append(path)
            (doomed / inner).rename(tmp_path / "aside")
            (doomed / inner).symlink_to(precious)

    before_calls(monkeypatch, exchanged)
    recover(tmp_path)
    assert swapped
    assert tree(precious) == before


def test_a_link_with_a_marked_name_is_left(original: Path, tmp_path: Path) -> None:
    link = pending_name(tmp_path / "saved")
    link.symlink_to(shutil.copytree(original, tmp_path / "precious"))
    recover(tmp_path)
    remove(link)
    assert link.is_symlink()
    assert tree(tmp_path / "precious") == tree(original)


def test_what_another_process_has_locked_is_not_removed(original: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(original, tmp_path / "saved"))
    lock = lock_folder(path)
    assert not discard(path)
    assert tree(path) == tree(original)
    unlock(lock)
    assert discard(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("before", ["scandir", "lock", "rename"])
def test_what_another_process_removes_first_is_no_error(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    path = Path(shutil.copytree(original, tmp_path / "saved"))
    before_calls(
        monkeypatch,
        lambda operation, of: operation == before and shutil.rmtree(path, ignore_errors=True),
    )
    assert not discard(path)
    assert os.listdir(tmp_path) == []


def test_pruning_counts_whole_checkpoints_and_leaves_links(
    engine: offload.Engine, original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for step in (1, 2, 3, 5):
        shutil.copytree(original, checkpoint.step_path(folder, step))
    for step in (1, 5):  # torn
        (checkpoint.step_path(folder, step) / "buffers.safetensors").unlink()
    shutil.copytree(original, tmp_path / "elsewhere")
    (folder / "step-000000").symlink_to(tmp_path / "elsewhere")
    written(folder / "step-4", "notes.txt")
    with pytest.raises(ValueError, match="keep_last is 0"):
        checkpoint.prune(folder, keep_last=0)
    assert checkpoint.prune(folder, keep_last=1) == [folder / "step-000002"]
    left = ["step-000000", "step-000001", "step-000003", "step-000005", "step-4"]
    assert sorted(os.listdir(folder)) == left
    assert tree(tmp_path / "elsewhere") == tree(original)
