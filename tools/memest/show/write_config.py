"""Writes an estimate as a configuration to train with: YAML below a comment on what was planned."""

from collections.abc import Iterator, Mapping
from typing import Any

from offload.config import OffloadConfig
from offload.config.file import dump_yaml
from offload.config.sections import WrittenFor
from offload.config.training import ModelConfig, TrainConfig
from offload.display.plain_text import plain
from offload.display.words import duration
from offload.planning.plan.plan import needed_nbytes
from offload.process import machine
from offload.tiers.ledger import StateClass
from offload.tiers.tier import TIERS
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.result import Estimate
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.show import view
from offload.tools.memest.source.model_source import ModelSource

_MIB = 1 << 20
_MAX_CHARS = 200  # characters of a name
_PRETRAINED_LR = 1e-5
_DEFAULTS = OffloadConfig().model_dump(mode="json", exclude_none=True)
# Of training alone, or written anew.
_NOT_GIVEN = {"optimizer", "clip_grad_norm", "gradient_accumulation_steps", "train", "written_for"}


def config_yaml(estimate: Estimate, case: Case, asked: OffloadConfig, file_name: str) -> str:
    """Return the text of a file that `offload.initialize(model, file_name)` takes, and `offload
    train` too if the model is a built-in one; for inference one that `offload.dispatch` takes.

    `asked`: the configuration before the machine was looked at; what neither model nor budgets
    decide stays as open as it is there.
    """
    source = case.source
    values = _planned(estimate, asked, pretrained=source.is_pretrained)
    if source.train_model is None:
        values["written_for"] = _written_for(estimate, source)
    elif estimate.inference is None:
        given = source.config.train if source.config is not None else None
        values["train"] = _train(estimate, source.train_model, given)
    header = "\n".join(_header(estimate, case, plain(file_name, _MAX_CHARS)))
    return f"{header}\n\n{dump_yaml(values)}"


def _header(estimate: Estimate, case: Case, file_name: str) -> Iterator[str]:
    profile, inference = case.profile, estimate.inference
    if not estimate.fits:
        yield f"# DOES NOT FIT: {view.missing_text(estimate)}"
    yield f"# {view.model_text(estimate, plain(estimate.model, _MAX_CHARS))}"
    yield f"# on {plain(estimate.hardware, _MAX_CHARS)}, {view.workload_text(estimate)}"
    if estimate.step is not None:
        time = duration(estimate.step.seconds)
        rate = view.per_second(estimate.step.tokens_per_s)
        what = "step" if inference is None else "decoding pass"
        yield (
            f"# predicted: {time} per {what} ({rate} tokens/s), bound by {estimate.step.bottleneck}"
        )
    peaks = (
        f"{view.place_title(tier)} {format_bytes(place.peak_nbytes)}"
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


def _planned(estimate: Estimate, asked: OffloadConfig, *, pretrained: bool) -> dict[str, Any]:
    """Return what was planned, then the other keys that were given."""
    config, plan, trains = estimate.config, estimate.plan, estimate.inference is None
    values: dict[str, Any] = {
        "device": "cuda" if plan.gpu else "cpu",
        "precision": config.precision,
        "budget": dict(_budget(estimate)),
        "nvme": _nvme(estimate, asked),
        "placement": _placement(estimate),
    }
    if trains:
        values["optimizer"] = _optimizer(estimate, asked, pretrained=pretrained)
        if config.clip_grad_norm is not None:
            values["clip_grad_norm"] = config.clip_grad_norm
        values["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    values["prefetch"] = config.prefetch
    for name, value in _changed(asked.model_dump(mode="json", exclude_none=True), _DEFAULTS):
        if name not in values and name not in _NOT_GIVEN:
            values[name] = value
    return values


def _budget(estimate: Estimate) -> Iterator[tuple[str, str | int]]:
    """Yield the most bytes that each tier may hold, without interpreter, libraries and activations:
    the budgets of the plan, rounded to the side that is needed."""
    plan = estimate.plan
    for tier in TIERS:
        budget, needed = plan.budgets[tier], needed_nbytes(plan, tier)
        if budget or needed:
            whole = budget // _MIB * _MIB
            yield str(tier), _size(budget if whole < needed or not whole else whole)
    if plan.gpu_budget_nbytes is not None:
        yield "gpu", _size(plan.gpu_budget_nbytes)


def _size(nbytes: int) -> str | int:
    for unit, name in ((1 << 30, "GiB"), (_MIB, "MiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return nbytes


def _nvme(estimate: Estimate, config: OffloadConfig) -> dict[str, Any]:
    paths = list(config.nvme.paths)
    if not paths and estimate.plan.opens_files:
        paths = [str(machine.swap_folder())]
    given = dict(_changed(config.nvme.model_dump(mode="json"), _DEFAULTS["nvme"]))
    return {**given, "paths": paths}


def _placement(estimate: Estimate) -> dict[str, Any]:
    config, plan, trains = estimate.config, estimate.plan, estimate.inference is None
    dumped = config.placement.model_dump(mode="json", exclude_none=True)
    placements: dict[str, Any] = {}
    for name, where in plan.placements.items():
        if trains or name is StateClass.PARAMETERS:
            placements[str(name)] = dumped.get(name, str(where.tiers[0]))
    if trains:
        kept = config.placement.activations
        placements["activations"] = {"tier": kept.tier, "checkpoint": kept.checkpoint}
    return placements


def _optimizer(estimate: Estimate, asked: OffloadConfig, *, pretrained: bool) -> dict[str, Any]:
    update: dict[str, Any] = {"chunk": estimate.plan.chunk_numel, "master": asked.master}
    is_open = "lr" not in asked.optimizer.model_fields_set
    if pretrained and is_open and asked.optimizer.type == "adamw":
        update["lr"] = _PRETRAINED_LR
    always = {"type", "lr", "master", "states", "chunk"}
    optimizer = asked.optimizer.model_copy(update=update)
    return {
        name: value
        for name, value in optimizer.model_dump(mode="json", exclude_none=True).items()
        if name in always or value != _DEFAULTS["optimizer"].get(name)
    }


def _written_for(estimate: Estimate, source: ModelSource) -> dict[str, Any]:
    sequence = estimate.workload.sequence
    if estimate.inference is not None:
        sequence = estimate.inference.generation.prompt
    written = WrittenFor(
        model=plain(source.name, _MAX_CHARS), parameters=estimate.numel, source=source.location,
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
