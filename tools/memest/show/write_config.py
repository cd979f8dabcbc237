"""Writes an estimate as a configuration to train with: YAML, each key with its effect here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from offload.config import OffloadConfig
from offload.config.file import dump_yaml
from offload.config.sections import WrittenFor
from offload.config.training import ModelConfig, TrainConfig
from offload.planning.plan.estimate import Estimate
from offload.planning.plan.plan import needed_nbytes
from offload.planning.plan.sizes import class_of
from offload.process import machine
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.show import view
from offload.tools.memest.source.model_source import ModelSource

_MIB = 1 << 20
_PRETRAINED_LR = 1e-5
_DEFAULTS = OffloadConfig().model_dump(mode="json", exclude_none=True)
# What is written with a text of its own; other keys follow as they are.
_WITH_TEXT = {
    "device", "precision", "seed", "budget", "nvme", "placement", "optimizer", "clip_grad_norm",
    "gradient_accumulation_steps", "micro_batches", "prefetch", "train", "written_for",
}  # fmt: skip

Key = tuple[str, Any, str]  # a key with the sections above it (`budget.host`), a value, a comment


def config_yaml(
    estimate: Estimate, case: Case, asked: OffloadConfig, file_name: str
) -> str:  # fmt: skip
    """Return the text of a file that `offload.initialize(model, file_name)` takes, and `offload
    train` too if the model is a built-in one; for inference one that `offload.dispatch` takes.

    `asked`: the configuration before the machine was looked at; what neither model nor budgets
    decide stays as open as it is there.
    """
    source, lines = case.source, [*_header(estimate, case, _one_line(file_name)), ""]
    lines += _commented(_keys(estimate, asked, pretrained=source.is_pretrained))
    rest = _changed(asked.model_dump(mode="json", exclude_none=True), _DEFAULTS)
    lines += _section({name: value for name, value in rest if name not in _WITH_TEXT})
    if source.train_model is None:
        comment = "what all of this was planned for; `offload plan` plans it again"
        lines += _section({"written_for": _written_for(estimate, source)}, comment)
    elif estimate.inference is None:
        given = source.config.train if source.config is not None else None
        comment = "`offload train`: the built-in model over bytes of text, to see that it works"
        lines += _section({"train": _train(estimate, source.train_model, given)}, comment)
    return "\n".join(lines) + "\n"


def _header(estimate: Estimate, case: Case, file_name: str) -> Iterator[str]:
    profile, inference = case.profile, estimate.inference
    if not estimate.fits:
        yield f"# DOES NOT FIT: {view.missing_text(estimate)}"
    yield f"# {view.model_text(estimate, _one_line(estimate.model))}"
    yield f"# on {_one_line(estimate.hardware)}, {view.workload_text(estimate)}"
    if estimate.step is not None:
        time = view.duration(estimate.step.seconds)
        rate = view.per_second(estimate.step.tokens_per_s)
        what = "step" if inference is None else "decoding pass"
        yield (
            f"# predicted: {time} per {what} ({rate} tokens/s), bound by {estimate.step.bottleneck}"
        )
    peaks = (
        f"{view.PLACE_TITLES[tier]} {format_bytes(place.peak_nbytes)}"
        for tier, place in view.places_of(estimate)
    )
    yield f"# predicted peaks: {', '.join(peaks)}"
    if profile.ranks > 1:
        whose = f"one of {profile.ranks} ranks"
        yield f"# all of this is of {whose}; start one process per rank (torchrun)"
    if inference is not None:
        yield f'# offload.dispatch(model, "{file_name}", weights=FOLDER), or'
        yield f"# `offload generate FOLDER --config {file_name}`"
        return
    if case.source.train_model is not None and estimate.fits:
        yield from _train_lines(f"offload train {file_name}", profile)
    else:
        yield "# Use:"
    yield f'#   engine = offload.initialize(model, "{file_name}")'


def _train_lines(command: str, profile: HardwareProfile) -> Iterator[str]:
    if profile.ranks == 1:
        yield f"# Train with `{command}`, or in a loop of your own:"
        return
    nodes = f"--nnodes {profile.nodes} " if profile.nodes > 1 else ""
    yield f"# Train{' on every node' if nodes else ''} with"
    yield f"#   torchrun {nodes}--nproc-per-node {profile.ranks_per_node} -m {command}"
    yield "# or in a loop of your own:"


# ---------------------------------------------------------------- keys with their effect
def _keys(estimate: Estimate, asked: OffloadConfig, *, pretrained: bool) -> Iterator[Key]:
    config, plan, trains = estimate.config, estimate.plan, estimate.inference is None
    yield "device", "cuda" if plan.gpu else "cpu", "where the model computes"
    what = f"parameters and gradients; master: {config.master}" if trains else "format of weights"
    yield "precision", config.precision, what
    if config.seed != _DEFAULTS["seed"]:
        yield "seed", config.seed, "random seed of weights, data order and sampling"
    yield from _budget(estimate)
    yield from _nvme(estimate, asked)
    yield from _placement(estimate)
    if trains:
        yield from _optimizer(estimate, asked, pretrained=pretrained)
        if config.clip_grad_norm is not None:
            yield "clip_grad_norm", config.clip_grad_norm, "largest gradient norm"
        passes = config.gradient_accumulation_steps
        yield "gradient_accumulation_steps", passes, "backward passes per step"
    pieces = "pieces of a batch that each block runs over before the next"
    yield "micro_batches", max(1, config.micro_batches), pieces
    yield "prefetch", config.prefetch, "groups fetched ahead"


def _budget(estimate: Estimate) -> Iterator[Key]:
    """Yield the most bytes that each tier may hold, without interpreter, libraries and activations:
    the budgets of the plan, rounded to the side that is needed."""
    plan = estimate.plan
    for tier in Tier:
        budget, needed = plan.budgets[tier], needed_nbytes(plan, tier)
        if not budget and not needed:
            continue
        whole = budget // _MIB * _MIB
        shown = budget if whole < needed or not whole else whole
        least = f"at least {format_bytes(needed)} needed" if needed else "nothing planned there"
        yield f"budget.{tier}", _size(shown), f"for states; {least}"


def _size(nbytes: int) -> str | int:
    for unit, name in ((1 << 30, "GiB"), (_MIB, "MiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return nbytes


def _nvme(estimate: Estimate, config: OffloadConfig) -> Iterator[Key]:
    paths, advice = list(config.nvme.paths), ""
    if not paths and estimate.plan.opens_files:
        paths, advice = [str(machine.swap_folder())], ": name folders on the fastest disks"
    what = f"swap files{advice}" if paths else "nothing is planned on disk"
    yield "nvme.paths", paths, what
    for name, value in _changed(config.nvme.model_dump(mode="json"), _DEFAULTS["nvme"]):
        if name != "paths":
            yield f"nvme.{name}", value, ""


def _placement(estimate: Estimate) -> Iterator[Key]:
    config, plan, trains = estimate.config, estimate.plan, estimate.inference is None
    dumped = config.placement.model_dump(mode="json", exclude_none=True)
    for placed, where in plan.placements.items():
        if not trains and class_of(placed) is not StateClass.PARAMETERS:
            continue
        *above, name = placed.split(".")
        values = dumped.get("experts", {}) if above else dumped
        held = sum(plan.homes[placed].values())
        value = values.get(name, str(where.tiers[0]))
        yield f"placement.{placed}", value, format_bytes(held)
    if trains:
        kept, key = config.placement.activations, "placement.activations"
        yield f"{key}.tier", kept.tier, "where what forward saves waits for backward"
        yield f"{key}.checkpoint", kept.checkpoint, "recompute blocks in backward"


def _optimizer(estimate: Estimate, asked: OffloadConfig, *, pretrained: bool) -> Iterator[Key]:
    update: dict[str, Any] = {"chunk": estimate.plan.chunk_numel, "master": asked.master}
    lr = "yours to choose"
    is_open = "lr" not in asked.optimizer.model_fields_set
    if pretrained and is_open and asked.optimizer.type == "adamw":
        update["lr"] = _PRETRAINED_LR
        lr = "usual for a pretrained model; from random weights 3e-4 would be"
    texts = {
        "type": "", "lr": lr, "master": "what exact 16-bit training keeps beside",
        "states": "fp32 is exact; bf16 and int8 are approximations",
        "chunk": "elements per piece streamed in the update",
    }  # fmt: skip
    optimizer = asked.optimizer.model_copy(update=update)
    for name, value in optimizer.model_dump(mode="json", exclude_none=True).items():
        if name in texts or value != _DEFAULTS["optimizer"].get(name):
            yield f"optimizer.{name}", value, texts.get(name, "")


def _commented(keys: Iterable[Key]) -> Iterator[str]:
    """Yield the lines of keys, each under its sections, with an empty line around outer ones."""
    opened: list[str] = []
    for key, value, comment in keys:
        *sections, name = key.split(".")
        if sections[:1] != opened[:1]:
            yield ""
        for depth, section in enumerate(sections, 1):
            if sections[:depth] != opened[:depth]:
                yield f"{'  ' * (depth - 1)}{section}:"
        opened = sections
        text = f"{'  ' * len(sections)}{name}: {dump_yaml(value, inline=True)}"
        yield f"{text:<38}  # {comment}" if comment else text


# ---------------------------------------------------------------- sections as they are
def _section(values: Mapping[str, Any], comment: str = "") -> Iterator[str]:
    if values:
        yield ""
        if comment:
            yield f"# {comment}"
        yield from dump_yaml(dict(values)).rstrip("\n").splitlines()


def _written_for(estimate: Estimate, source: ModelSource) -> dict[str, Any]:
    sequence = estimate.workload.sequence
    if estimate.inference is not None:
        sequence = estimate.inference.generation.prompt
    written = WrittenFor(
        model=_one_line(source.name), parameters=estimate.numel, source=source.location,
        batch=estimate.workload.batch, sequence=sequence,
    )  # fmt: skip
    return written.model_dump(exclude_none=True)


def _train(estimate: Estimate, model: ModelConfig, given: TrainConfig | None) -> dict[str, Any]:
    """Return the section that trains `model`, by `given` where the configuration has one."""
    work = estimate.workload
    if given is None:
        longest = max(work.sequence, model.max_sequence)
        given = TrainConfig(model=model.model_copy(update={"max_sequence": longest}))
    train = given.model_copy(update={"batch": work.batch, "sequence": work.sequence})
    values = train.model_dump(mode="json", exclude_none=True)
    changed = dict(_changed(values, TrainConfig().model_dump(mode="json", exclude_none=True)))
    always = ("model", "steps", "batch", "sequence")
    return {name: value for name, value in values.items() if name in always or name in changed}


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if value is not None and value != usual.get(name):
            yield name, value


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)[:200]
