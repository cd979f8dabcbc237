"""Other writers in folders of swap files: links that appear between a check and a use, and folders
of other users."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from offload.swap.io import pinned_folder
from offload.swap.io.pinned_folder import PinnedFolder
from offload.swap.io.swap_file import SwapFile
from offload.tiers.errors import PathError
from offload.tiers.tier import PAGE_NBYTES

ROOT = os.geteuid() == 0
SOMEBODY = 12345


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Where links of an attacker lead. Nothing may ever be made or changed there."""
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o700)
    os.utime(folder, ns=(1, 1))
    return folder


def untouched(folder: Path) -> bool:
    return not any(folder.iterdir()) and folder.stat().st_mtime_ns == 1


def exchanged(folder: Path, victim: Path) -> None:
    """The folder's name leads to the victim's now."""
    folder.rename(folder.with_name("moved away"))
    folder.symlink_to(victim)


def named_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that makes open fail where O_TMPFILE is not known."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)


# ----------------------------------------------------------------------- links
@pytest.mark.parametrize("unnamed", [True, False], ids=["unnamed", "named"])
def test_a_name_that_leads_elsewhere_after_the_checks_is_not_followed(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:
        named_files(monkeypatch)
    target = tmp_path / "swap"
    target.mkdir()
    check = pinned_folder.check_writable

    def then_exchange(folder: PinnedFolder) -> None:
        check(folder)
        exchanged(target, victim)

    monkeypatch.setattr(pinned_folder, "check_writable", then_exchange)
    with SwapFile(target) as file:
        file.reserve(PAGE_NBYTES)
        assert os.fstat(file.fd).st_nlink == 0
    assert untouched(victim)
    assert not any((tmp_path / "moved away").iterdir())


# ----------------------------------------------------------------------- owners
@pytest.mark.skipif(not ROOT, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused_and_one_in_it_is_not(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, SOMEBODY, SOMEBODY)
    with pytest.raises(PathError, match=r"belongs to user 12345 \(mode 0755\), and this is user"):
        SwapFile(theirs)
    with SwapFile(theirs / "private") as file:  # as the message says
        file.reserve(PAGE_NBYTES)
    theirs.chmod(0o1777)  # as a folder for everybody
    SwapFile(theirs).close()


# ----------------------------------------------------------------------- without O_TMPFILE
def test_a_file_that_cannot_lose_its_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_files(monkeypatch)

    def unlink(path: Any, **keys: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(PathError, match="a file cannot be created in"):
        SwapFile(tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_size == 0


def test_descriptors_are_given_back_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leak: None
) -> None:
    named_files(monkeypatch)
    real = os.open

    def failing(path: Any, *args: Any, **keys: Any) -> int:
        if str(path).startswith("offload-swap"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **keys)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(PathError, match="Too many open files"):
        SwapFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
