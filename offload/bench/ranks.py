"""`offload bench ranks`: training steps of several ranks on this machine.

As in `step`, systems step in turn, each in processes of its own, one per rank. A turn takes as long
as its slowest rank; the memory is that of all ranks together.
"""

from collections.abc import Sequence

from offload.bench.contenders import (
    OFFLOAD,
    Contender,
    StepOptions,
    SystemSpec,
    all_on,
    base_config,
    train_in_turn,
)
from offload.bench.record import Kind, Record
from offload.bench.rounds import Say
from offload.bench.table import Column, number
from offload.gpt import build_meta_model, parameter_count


def _offload(name: str, stage: int, tier: str) -> SystemSpec:
    budget = "budget.host=" + ("768MiB" if tier == "nvme" else "auto")
    overrides = (*all_on(tier), budget, f"zero.stage={stage}")
    return SystemSpec(name, f"offload, stage {stage}, {tier}", Kind.OFFLOAD, OFFLOAD, overrides)


SYSTEMS = (
    _offload("stage3", 3, "host"),
    _offload("stage2", 2, "host"),
    _offload("stage3-nvme", 3, "nvme"),
)
COLUMNS = (
    Column("s/step", number("seconds")),
    Column("fwd+bwd", number("forward_backward_s")),
    Column("GiB of all ranks", number("peak_rss_nbytes", 2**30)),
)
_LOSS_BOUND = 1e-5  # between systems at equal steps, relative: sums in other orders


def run_ranks(options: StepOptions, say: Say, peers: Sequence[SystemSpec] = ()) -> Record:
    """Run the bench; raises as `train_in_turn` does."""
    base = base_config(options.config, options.overrides)
    record = Record("ranks", {})
    systems, _ = train_in_turn(record, options, (*SYSTEMS, *peers), base, say)
    for other in SYSTEMS[1:]:
        record.compare(SYSTEMS[0].label, other.label, "seconds")
        record.compare(SYSTEMS[0].label, other.label, "peak_rss_nbytes")
    _note_losses(record, systems)
    numel = parameter_count(build_meta_model(base))
    record.notes.append(
        f"{options.ranks} ranks, gloo; {numel / 1e6:.4g} M parameters, "
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
