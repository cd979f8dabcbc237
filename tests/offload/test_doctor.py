"""The doctor's checks and how they are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from offload.cli.doctor import Check, Status, check_path, print_checks, run_checks, verdict


def test_a_missing_folder_is_named_with_its_remedy(tmp_path: Path) -> None:
    (check,) = check_path(tmp_path / "nothing")
    assert (check.status, check.finding) == ("fail", "does not exist")
    assert check.advice.startswith(f"mkdir -p {tmp_path / 'nothing'}")
    (tmp_path / "file").touch()
    assert check_path(tmp_path / "file")[0].finding == "is not a folder"


def test_a_folder_open_to_all_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert any(check.finding == "world-writable, no sticky bit" for check in check_path(tmp_path))
    tmp_path.chmod(0o1777)
    assert not any("world-writable" in check.finding for check in check_path(tmp_path))


def test_a_folder_in_ram_is_a_warning() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    checks = {check.name: check for check in check_path(Path("/dev/shm"))}
    assert checks["/dev/shm file system"].status == "warn"


def checked(*checks: tuple[str, Status, str]) -> list[Check]:
    """The check of an installed torch, and the given ones."""
    return [Check("torch", "ok", "2.13"), *(Check(*check, advice="do it") for check in checks)]


def test_the_verdict_says_what_the_machine_can_do() -> None:
    cpu = verdict(checked(("gpu", "off", "built for the CPU only; device: cpu is used")))
    assert cpu == (
        True,
        ["ready: trains on the CPU with host and nvme", "no GPU: built for the CPU only"],
    )
    _, one = verdict(
        checked(("gpu 0", "ok", "H100, 80.0 GiB, CUDA 13.0"), ("swap", "warn", "full"))
    )
    assert one == [
        "ready: trains on H100 with device, host and nvme",
        "to look at, with the advice above: swap",
    ]
    _, two = verdict(checked(("gpu 0", "ok", "H100, 80 GiB"), ("gpu 1", "ok", "H100, 80 GiB")))
    assert "2 GPUs (H100; torchrun --nproc-per-node 2)" in two[0]


def test_the_exit_code_agrees_with_the_verdict(tmp_path: Path, capsys: Any) -> None:
    print_checks([tmp_path])
    assert "ready: trains on " in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        print_checks([tmp_path / "nothing"])
    assert ended.value.exit_code == 2, "as of any path that is not there"
    assert "not ready: " in capsys.readouterr().out


def test_a_device_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        kind = "cuda"

        def device_count(self) -> int:
            return 1

        def facts(self, device: object) -> object:
            raise RuntimeError("CUDA unknown error\nsecond line")

    monkeypatch.setattr("offload.tiers.accelerator.default", Broken)
    (gpu,) = [check for check in run_checks() if check.name.startswith("gpu")]
    assert (gpu.status, gpu.finding) == ("fail", "cannot be used: CUDA unknown error")
