"""`offload bench ranks`: training steps of several ranks on this machine.

As in `step`, systems step in turn, each in processes of its own, one per rank. A turn takes as long
as its slowest rank; the memory is that of all ranks together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from offload.bench.contenders import (
    OURS,
    Contender,
    SystemSpec,
    all_on,
    base_config,
    count_parameters,
    start,
    wanted,
)
from offload.bench.record import Kind, Record
from offload.bench.rounds import Say, interleaved
from offload.bench.step import StepOptions, folder_of
from offload.bench.table import Column, number
from offload.tiers.errors import ConfigError


def _ours(name: str, stage: int, tier: str, nbytes: int) -> SystemSpec:
    budget = "budget.host=" + ("768MiB" if tier == "nvme" else "auto")
    overrides = (*all_on(tier), budget, f"zero.stage={stage}")
    return SystemSpec(name, f"ours, stage {stage}, {tier}", Kind.OURS, OURS, overrides, nbytes)


SYSTEMS = (
    _ours("stage3", 3, "host", 24),
    _ours("stage2", 2, "host", 28),
    _ours("stage3-nvme", 3, "nvme", 12),
)
COLUMNS = (
    Column("s/step", number("seconds")),
    Column("fwd+bwd", number("forward_backward_s")),
    Column("GiB of all ranks", number("peak_rss_nbytes", 2**30)),
)
_LOSS_BOUND = 1e-5  # between systems at equal steps, relative: sums in other orders


@dataclass(frozen=True)
class RanksOptions(StepOptions):
    """Options of a bench of `ranks` processes that train together."""

    ranks: int = 2


def run_ranks(options: RanksOptions, say: Say, peers: Sequence[SystemSpec] = ()) -> Record:
    """Run the bench. ChildFailed if one of our own systems ends early; ConfigError and PathError
    before anything is started."""
    base = base_config(options.config, options.overrides)
    if options.ranks < 2:
        raise ConfigError(f"--ranks: {options.ranks} is not several; `offload bench step` has one")
    specs = wanted(options.systems, (*SYSTEMS, *peers))
    folder = folder_of(options.folder)
    texts = {"config": str(options.config or "151 M Llama shape"), "folder": str(folder)}
    record = Record("ranks", {**asdict(options), **texts})
    record.note_rounds(options.rounds)
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        systems, missing = start(specs, base, private, stack, say, options.ranks)
        results = interleaved({s.spec.label: s.turn for s in systems}, options.rounds, say)
        say("closing")
        for system in systems:
            system.close()
    for system in systems:
        turns = results[system.spec.label]
        record.rows.append(system.row(turns, ("seconds", "forward_backward_s")))
    record.rows += missing
    for other in SYSTEMS[1:]:
        record.compare(SYSTEMS[0].label, other.label, "seconds")
        record.compare(SYSTEMS[0].label, other.label, "peak_rss_nbytes")
    _note_losses(record, systems)
    record.notes.append(
        f"{options.ranks} ranks, gloo; {count_parameters(base) / 1e6:.4g} M parameters, "
        f"{base.precision}, batch {base.train.batch} x {base.train.sequence} tokens per rank"
    )
    return record


def _note_losses(record: Record, systems: Sequence[Contender]) -> None:
    """Note whether all train the same: a faster system that does not is no faster one."""
    first = systems[0].losses
    record.details["losses"] = {s.spec.name: s.losses for s in systems}
    for system in systems[1:]:
        pairs = [(a, b) for x, y in zip(first, system.losses, strict=False)
                 for a, b in zip(x, y, strict=True)]  # fmt: skip
        worst = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
        if not worst <= _LOSS_BOUND:
            record.notes.append(
                f"{system.spec.label} has other losses than {systems[0].spec.label}: by {worst:.2g}"
            )
