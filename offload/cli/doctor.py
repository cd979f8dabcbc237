"""`offload doctor`: checks of the machine, one `Check` per line of the table, and a verdict.

No check raises: a property that cannot be determined is reported as `off` with the reason.
"""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer
from rich.text import Text

from offload.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED
from offload.display.console import PlainConsole, table
from offload.process import machine
from offload.tiers import accelerator
from offload.tiers.errors import OffloadError
from offload.tiers.units import format_bytes

Status = Literal["ok", "warn", "off", "fail"]  # fail: nothing can be trained before it is mended

_LOW_MEMORY_NBYTES = 2 << 30
_LOW_DISK_NBYTES = 10 << 30
_STYLES = {"ok": "green", "warn": "yellow", "off": "dim", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """One checked item: the finding, and advice if it is not as it should be."""

    name: str
    status: Status
    finding: str
    advice: str = ""


def verdict(checks: Sequence[Check]) -> tuple[bool, list[str]]:
    """Return whether the machine is ready, as none of the checks of `run_checks` failed, and lines
    that say what it can do or what prevents a run."""
    failed = [f"not ready: {c.name}: {c.finding}; {c.advice}" for c in checks if c.status == "fail"]
    if failed:
        return False, failed
    gpus = [check for check in checks if check.name.startswith("gpu ")]
    tiers = "device, host and nvme" if gpus else "host and nvme"
    lines = [f"ready: trains on {_computing(gpus)} with {tiers}"]
    lines += [f"no GPU: {c.finding.partition(';')[0]}" for c in checks if c.name == "gpu"]
    warned = [check.name for check in checks if check.status == "warn"]
    if warned:
        lines.append(f"to look at, with the advice above: {', '.join(warned)}")
    return True, lines


def _computing(gpus: Sequence[Check]) -> str:
    if not gpus:
        return "the CPU"
    name = gpus[0].finding.partition(",")[0]
    many = f"{len(gpus)} GPUs ({name}; torchrun --nproc-per-node {len(gpus)})"
    return many if len(gpus) > 1 else name


def run_checks(paths: Sequence[Path] = ()) -> list[Check]:
    """Check the machine and each of `paths` (the default folder if there is none)."""
    folders = paths or [machine.swap_folder()]
    return [*_machine(), *_gpu(), *(check for path in folders for check in check_path(path))]


def check_path(path: Path) -> list[Check]:
    """Check the file system, room, permissions and I/O backends of one folder for swap files."""
    shown = str(path)
    if not path.is_dir():
        if path.exists():
            return [Check(shown, "fail", "is not a folder", "name a folder in nvme.paths")]
        return [Check(shown, "fail", "does not exist", f"mkdir -p {path}, or correct nvme.paths")]
    if not os.access(path, os.W_OK | os.X_OK):
        return [Check(shown, "fail", "not writable by this user", f"chown or chmod {path}")]
    checks, mount = [Check(f"{path} file system", "off", "unknown")], machine.mount_of(path)
    if mount is not None:
        finding = f"{mount.kind} on {mount.point}"
        checks = [_warned_if(bool(mount.remark), f"{path} file system", finding, mount.remark)]
    usage = shutil.disk_usage(path)
    finding = f"{format_bytes(usage.free)} of {format_bytes(usage.total)}"
    low, advice = usage.free < _LOW_DISK_NBYTES, "free some, or name another folder in nvme.paths"
    checks.append(_warned_if(low, f"{path} free", finding, advice))
    mode = path.stat().st_mode
    if mode & 0o002 and not mode & 0o1000:
        advice = f"chmod o-w {path}: others could replace its files"
        checks.append(Check(f"{shown} access", "warn", "world-writable, no sticky bit", advice))
    return [*checks, *_backends(path)]


def _machine() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in ("torch", "numba", "numpy"):
        yield Check(name, "ok", str(machine.version_of(name)))
    total, nbytes = machine.total_memory_nbytes(), machine.available_memory_nbytes()
    yield Check("memory", "ok", f"{format_bytes(total)} in the machine")
    for limit in machine.memory_limits():
        finding = f"{format_bytes(limit.limit_nbytes)}, {format_bytes(limit.used_nbytes)} used"
        name = "cgroup memory limit" if limit.kills else "cgroup memory.high"
        yield Check(name, "ok", f"{finding}, in {limit.folder}")
    advice = "close other programs, or keep budget.host well below this"
    low = nbytes < _LOW_MEMORY_NBYTES
    yield _warned_if(low, "memory available", format_bytes(nbytes), advice)
    quota = machine.cpu_quota()
    note = f", cgroup quota {quota:.1f}" if quota is not None else ""
    finding = f"{machine.cpu_count()} of {os.cpu_count()} usable{note}; {machine.cpu_model()}"
    yield Check("cores", "ok", finding)
    # products of matrices in 16 bits, where there is no GPU
    slow = " and ".join(machine.slow_matmul_precisions())
    advice = f"on the CPU use precision: fp32; {slow} can take 100 times as long"
    finding = f"slow for {slow}" if slow else "fast for bf16 and fp16"
    yield _warned_if(bool(slow), "16-bit products", f"{finding} on this CPU", advice)


def _warned_if(bad: bool, name: str, finding: str, advice: str) -> Check:
    return Check(name, "warn", finding, advice) if bad else Check(name, "ok", finding)


def _gpu() -> list[Check]:
    kind = accelerator.default()
    if kind is not None:
        return [_device(kind, index) for index in range(kind.device_count())]
    built_for = [*filter(None, (known.built_for() for known in accelerator.KINDS.values()))]
    if not built_for:
        return [Check("gpu", "off", "this torch is built for the CPU only; device: cpu is used")]
    advice = "check the driver (nvidia-smi, rocm-smi) and CUDA_VISIBLE_DEVICES"
    return [Check("gpu", "off", f"torch for {', '.join(built_for)} sees no device", advice)]


def _device(kind: accelerator.Accelerator, index: int) -> Check:
    import torch

    try:
        facts = kind.facts(torch.device(kind.kind, index))
        free = f"{format_bytes(kind.free_nbytes(torch.device(kind.kind, index)))} free"
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        advice = "check the driver (nvidia-smi, rocm-smi), or train with device: cpu"
        return Check(f"gpu {index}", "fail", f"cannot be used: {said}", advice)
    capability = f"compute capability {facts.compute_capability}"
    memory = f"{format_bytes(facts.memory_nbytes)} ({free})"
    facts_shown = (facts.name, memory, capability, kind.built_for())
    return Check(f"gpu {index}", "ok", ", ".join(filter(None, facts_shown)))


def _backends(path: Path) -> list[Check]:
    from offload.swap.io.backends import probe_backends

    try:
        reports = probe_backends(path)
    except (OSError, OffloadError) as error:
        problem, _, remedy = str(error).partition("; ")
        advice = remedy or "name another folder in nvme.paths"
        return [Check(f"{path} backends", "fail", f"cannot be tried: {problem}", advice)]
    checks = []
    for report in reports:
        status: Status = "ok" if report.available else "off"
        checks.append(Check(f"{path} {report.name}", status, report.reason))
    if not any(report.o_direct for report in reports if report.available):
        advice = "slower and takes RAM: name a folder on ext4 or xfs in nvme.paths"
        checks.append(Check(f"{path} O_DIRECT", "warn", "refused here", advice))
    return checks


def print_checks(paths: Sequence[Path]) -> None:
    """Check the machine (and `paths`), and print the findings and the verdict. The exit code is 1
    if nothing can be trained, 2 if a path is no folder."""
    checks = run_checks(paths)
    ready, lines = verdict(checks)
    console = PlainConsole()
    shown = table("what", "", "found")
    for check in checks:
        shown.add_row(check.name, Text(check.status, style=_STYLES[check.status]), check.finding)
    console.print(shown)
    console.print()
    for check in checks:
        if check.advice:  # with commands to be copied: no table breaks them
            console.print(f"{check.name}: {check.advice}", style="italic", soft_wrap=True)
    console.print()
    for line in lines:
        console.print(line, style="green" if ready else "red", soft_wrap=True)
    if any(not path.is_dir() for path in paths):
        raise typer.Exit(EXIT_BAD_INPUT)
    if not ready:
        raise typer.Exit(EXIT_FAILED)
