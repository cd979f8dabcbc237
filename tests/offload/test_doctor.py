"""The doctor's checks and how they are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.cli.doctor import print_checks
from offload.doctor import check_path, run_checks


def test_every_check_says_something_and_every_warning_advises(tmp_path: Path) -> None:
    checks = run_checks([tmp_path, tmp_path / "nothing"])
    assert {check.status for check in checks} <= {"ok", "warn", "off"}
    assert all(check.found for check in checks)
    assert all(check.advice for check in checks if check.status == "warn")
    names = {check.name for check in checks}
    assert {"python", "torch", "memory available", "cores", "swap", "memlock limit"} <= names
    assert any(name.startswith("gpu") for name in names)


def test_backends_of_a_folder_are_listed(tmp_path: Path) -> None:
    names = {check.name for check in check_path(tmp_path)}
    assert {f"{tmp_path} threads", f"{tmp_path} file system", f"{tmp_path} free"} <= names


def test_a_missing_folder_is_named_with_its_remedy(tmp_path: Path) -> None:
    (check,) = check_path(tmp_path / "nothing")
    assert (check.status, check.found) == ("warn", "does not exist")
    assert check.advice.startswith(f"mkdir -p {tmp_path / 'nothing'}")
    (tmp_path / "file").touch()
    assert check_path(tmp_path / "file")[0].found == "is not a folder"


def test_a_folder_open_to_all_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert any(check.found == "world-writable, no sticky bit" for check in check_path(tmp_path))
    tmp_path.chmod(0o1777)
    assert not any("world-writable" in check.found for check in check_path(tmp_path))


def test_a_folder_in_ram_is_a_warning() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    found = {check.name: check for check in check_path(Path("/dev/shm"))}
    assert found["/dev/shm file system"].status == "warn"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(
    columns: int, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_checks([tmp_path], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15
    assert max(map(len, lines)) <= columns


def test_json_holds_the_same_checks(tmp_path: Path, capsys: Any) -> None:
    print_checks([tmp_path], as_json=True)
    checks = json.loads(capsys.readouterr().out)
    assert {"name", "status", "found", "advice"} == set(checks[0])
