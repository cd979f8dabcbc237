"""Checks that find later failures before the first byte is allocated.

`shortfalls` checks a plan against its budgets, the usable memory and free disk. This module checks
the machine's present state: RAM that other processes leave, files that lie in RAM, and the kind of
file system that each folder is on.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from offload.config.paths import StrPath
from offload.planning.machine.baseline import GPU_NBYTES
from offload.planning.plan.estimate import MemoryClass, PlaceEstimate
from offload.planning.plan.plan import Plan, breakdown, needed_nbytes, ram_nbytes
from offload.process import machine
from offload.tiers.errors import BudgetError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes, in_one_unit

_ROOT = Path("/")
_ON_GPU = {
    MemoryClass.ACTIVATIONS: "pass", MemoryClass.STAGING: "copies and buffers",
    MemoryClass.FRAGMENTATION: "unused", MemoryClass.FRAMEWORK: "context and workspaces",
}  # fmt: skip


def gpu_line(gpu: PlaceEstimate | None) -> str:
    """The sum of a GPU's memory in words, `GPU 21.3 of 24.0 GiB: parameters 4.0, pass 8.0`; empty
    without a GPU."""
    if gpu is None:
        return ""
    unit, name = (1 << 30, "GiB") if gpu.capacity_nbytes >= 1 << 30 else (1 << 20, "MiB")
    sizes = {_ON_GPU.get(c, str(c)): f"{n / unit:,.1f}" for c, n in gpu.by_class.items()}
    parts = ", ".join(f"{c} {size}" for c, size in sizes.items() if size != "0.0")
    used, there = gpu.peak_nbytes / unit, gpu.capacity_nbytes / unit
    return f"GPU {used:,.1f} of {there:,.1f} {name}: {parts}"


def divided_gpu(plan: Plan, there_nbytes: int) -> str:
    """How a plan divides memory of a GPU, where a pass is not known, in words."""
    tier = plan.budgets[Tier.DEVICE]
    left = there_nbytes - tier - GPU_NBYTES
    there, held, context, for_pass = in_one_unit(there_nbytes, tier, GPU_NBYTES, left)
    return (
        f"GPU {there}: device tier {held} ({breakdown(plan, Tier.DEVICE)}, and copies), context "
        f"and workspaces {context}, {for_pass} for the pass"
    )


def preflight(
    plan: Plan, paths: Sequence[StrPath], *,
    freed_nbytes: int = 0, passing_nbytes: int = 0, root: Path = _ROOT,
) -> tuple[str, ...]:  # fmt: skip
    """Check `plan` against the present state of the machine; return warnings as sentences.

    `freed_nbytes` is the RAM of existing parameters that will move into the tiers, `passing_nbytes`
    the RAM of activations, where it is known. `/proc` and `/sys` are read below `root`.

    Raises BudgetError if RAM is short.
    """
    folders = [Path(path).expanduser().absolute() for path in paths] if plan.opens_files else []
    _check_memory(plan, folders, freed_nbytes, root)
    return (
        *_file_systems(plan, folders, root), *_budget_beyond(plan, root),
        *activations_beyond(plan, passing_nbytes, root),
    )  # fmt: skip


def _check_memory(plan: Plan, folders: Sequence[Path], freed: int, root: Path) -> None:
    """Raise BudgetError if RAM is short of the host tier, a CPU's device tier or files there."""
    held = ram_nbytes(plan)
    files = _files_in_memory(plan, folders, root)
    available = machine.available_memory_nbytes(root) + freed
    needed = held + files
    if needed <= available:
        return
    takes, there, missing, in_files, in_memory = in_one_unit(
        needed, available, needed - available, files, held
    )
    if files and held <= available:
        raise BudgetError(
            f"nvme.paths: {folders[0]} is RAM ({in_files} of files), and with {in_memory} of "
            f"memory the plan is {missing} beyond the {there} available; name a folder on a "
            "disk, or lower budget.nvme"
        )
    raise BudgetError(
        f"budget.host: the plan needs {takes} of RAM, {there} are available now, {missing} short; "
        "close other programs, or lower budget.host or move a class to nvme"
    )


def _files_in_memory(plan: Plan, folders: Sequence[Path], root: Path) -> int:
    """The bytes of swap files that take RAM."""
    mounts = [machine.mount_of(folder, root) for folder in folders]
    share = sum(mount is not None and mount.is_memory for mount in mounts) / max(1, len(mounts))
    return int(needed_nbytes(plan, Tier.NVME) * share)


def _file_systems(plan: Plan, folders: Sequence[Path], root: Path) -> Iterator[str]:
    for folder in folders:
        mount = machine.mount_of(folder, root)
        if mount is None or not mount.remark:
            continue
        text = f"nvme.paths: {folder} is on {mount.kind} ({mount.point}): {mount.remark}"
        if mount.is_memory:
            nbytes = needed_nbytes(plan, Tier.NVME) // len(folders)
            text += f"; its {format_bytes(nbytes)} come on top of budget.host"
        yield text


def _budget_beyond(plan: Plan, root: Path) -> Iterator[str]:
    """Warn if the host budget, which copies may fill, is more than the free RAM."""
    budget, available = plan.budgets[Tier.HOST], machine.available_memory_nbytes(root)
    if not plan.copies_on_host or budget <= available:
        return
    wanted, there = in_one_unit(budget, available)
    yield (
        f"budget.host: {wanted}, but {there} of RAM are available "
        "now; what is left of the budget is filled with copies: lower it, or close other programs"
    )


def activations_beyond(plan: Plan, passing: int, root: Path = _ROOT) -> Iterator[str]:
    """Warn if the tiers and `passing` bytes of activations are more than the free RAM."""
    held, available = ram_nbytes(plan), machine.available_memory_nbytes(root)
    if plan.gpu or not passing or held + passing <= available:
        return
    states, activations, more, there = in_one_unit(
        held, passing, held + passing - available, available
    )
    yield (
        f"RAM: states need {states} and activations about {activations}, {more} more than the "
        f"{there} that are available now; set placement.activations.checkpoint: true, lower the "
        "batch, or close other programs"
    )
