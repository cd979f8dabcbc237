"""Everything `memest` says about one model, put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offload import machine
from offload.config import OffloadConfig
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Estimate
from offload.planning.plan.workload import Workload
from offload.planning.step.step_time import MOST_PASSES
from offload.tiers.units import format_bytes
from offload.tools.memest.case import Case, Verdict
from offload.tools.memest.changes import changes
from offload.tools.memest.judge import Judge
from offload.tools.memest.parts import NCCL
from offload.tools.memest.profiles import HardwareProfile
from offload.tools.memest.source import ModelSource, SourceKind


def estimate(
    source: ModelSource, config: OffloadConfig, workload: Workload, profile: HardwareProfile,
    speeds: Speeds | None, judge: Judge | None = None,
    *, advise: bool = False, by_node: bool = False,
) -> Estimate:  # fmt: skip
    """What training takes, with what would make it fit where it does not.

    `speeds`: one rank's; None where they are not known: then there are no times. `judge`: one that
    has seen the model before. `advise`: also what would make a step faster, which takes longer.
    `by_node`: the reader makes nodes' memory of it, and shows no times of several ranks.
    """
    case = Case(source, config, workload, profile, speeds)
    judge = judge or Judge()
    verdict = judge(case)
    found = Estimate(
        model=source.name,
        numel=source.shape.numel,
        numel_trainable=source.shape.numel_trainable,
        hardware=hardware_text(profile),
        workload=workload,
        config=verdict.config,
        plan=verdict.plan,
        memory=verdict.memory,
        step=verdict.step,
        shortfalls=verdict.shortfalls,
        notes=(*_notes(case, verdict), *_ranks(case, by_node=by_node)),
        system_nbytes=profile.system_nbytes // profile.ranks_per_node,
        endurance_nbytes=speeds.endurance_nbytes if speeds is not None else 0,
    )
    if not found.fits:
        return replace(found, changes=changes(case, verdict, judge))
    return replace(found, changes=judge.advice(case)) if advise else found


def hardware_text(profile: HardwareProfile) -> str:
    """The profile's name; of this machine also what it has."""
    if profile.name != "this machine":
        return profile.name
    parts = [machine.cpu_model(), f"{profile.cores} cores"]
    if profile.gpu_nbytes:
        name = profile.gpu.name if profile.gpu is not None else "GPU"
        count = f"{profile.gpus} x " if profile.gpus > 1 else ""
        parts.append(f"{count}{name} with {format_bytes(profile.gpu_nbytes)}")
    parts.append(f"{format_bytes(profile.ram_nbytes)} RAM")
    parts.append(f"{format_bytes(profile.nvme_nbytes)} free disk")
    return f"this machine ({', '.join(parts)})"


def _notes(case: Case, verdict: Verdict) -> Iterator[str]:
    yield from case.source.notes
    if case.source.has_graph and case.source.traced is not None:
        yield case.source.traced(case.workload.sequence)
    yield from case.profile.notes
    if case.profile.reserve_note:
        yield case.profile.reserve_note
    yield from verdict.notes
    if case.source.kind is SourceKind.SAFETENSORS:
        yield (
            "weights alone do not tell what forward keeps: activations are not counted, and there "
            "are no times; put the config.json beside them"
        )
    elif case.speeds is not None and case.workload.passes > MOST_PASSES:
        yield (
            f"of {case.workload.passes:,} passes per step {MOST_PASSES} are gone through (and "
            "drawn); each further one is taken to be like the last of these"
        )
    elif case.source.has_graph and case.speeds is None:
        yield "no times: speeds are not known; `memest calibrate` measures this machine's"


def _ranks(case: Case, *, by_node: bool) -> Iterator[str]:
    """Who the numbers are of, and what is not known of the others."""
    if case.profile.ranks == 1:
        return
    sharding, stage = case.sharding, case.config.zero.stage
    groups = "" if sharding.replicas == 1 else f" in {sharding.replicas} shard groups"
    if not by_node:
        yield (
            f"memory and disk (but for the checkpoint) are of one of {case.profile.ranks} ranks"
            f"{groups}, ZeRO stage {stage}"
        )
    if stage in (1, 2):
        yield "under `no_sync` a rank holds whole gradients, which are not counted here"
    if by_node:
        return
    if case.timed:
        yield f"collectives are timed by the ratings of the links; latencies: {NCCL.source}"
    elif case.speeds is not None and case.source.has_graph:
        yield "no times: the network between the ranks is not known; name a machine (--profile)"
