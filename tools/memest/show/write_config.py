"""Writes an estimate as a configuration to train with: YAML, each key with its effect here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.config import OffloadConfig
from offload.config.file import dump_yaml
from offload.config.model import WrittenFor
from offload.config.training import TrainConfig
from offload.planning.plan.estimate import Estimate
from offload.planning.plan.plan import home_nbytes, needed_nbytes
from offload.planning.plan.sizes import ExpertClass, class_of
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
_DEFAULTS = OffloadConfig()


def config_yaml(
    estimate: Estimate, case: Case, asked: OffloadConfig, file_name: str
) -> str:  # fmt: skip
    """Return the text of a file that `offload.initialize(model, file_name)` takes, and `offload
    train` too if the model is a built-in one; for inference one that `offload.dispatch` takes.

    `asked`: the configuration before the machine was looked at; what neither model nor budgets
    decide stays as open as it is there.
    """
    source = case.source
    lines = [*_header(estimate, case, file_name), *_compute(estimate), *_budget(estimate)]
    lines += [*_nvme(estimate, asked), *_placement(estimate)]
    if estimate.inference is None:
        lines += _optimizer(estimate, asked, pretrained=source.is_pretrained)
    lines += _step(estimate)
    lines += _rest(asked)
    lines += _written_for(estimate, source)
    if estimate.inference is None:
        lines += _train(estimate, source)
    return "\n".join(lines) + "\n"


def _header(
    estimate: Estimate, case: Case, file_name: str
) -> Iterator[str]:  # fmt: skip
    if not estimate.fits:
        yield f"# DOES NOT FIT: {view.missing_text(estimate)}"
    yield f"# {view.model_text(estimate, _one_line(estimate.model))}"
    yield f"# on {_one_line(estimate.hardware)}, {view.workload_text(estimate)}"
    if estimate.step is not None:
        time = view.duration(estimate.step.seconds)
        rate = view.per_second(estimate.step.tokens_per_s)
        what = "step" if estimate.inference is None else "decoding pass"
        yield (
            f"# predicted: {time} per {what} ({rate} tokens/s), bound by {estimate.step.bottleneck}"
        )
    peaks = (
        f"{view.PLACE_TITLES[tier]} {format_bytes(place.peak_nbytes)}"
        for tier, place in view.places_of(estimate)
    )
    yield f"# predicted peaks: {', '.join(peaks)}"
    profile = case.profile
    if profile.ranks > 1:
        whose = f"one of {profile.ranks} ranks"
        yield f"# all of this is of {whose}; start one process per rank (torchrun)"
    ep_size = 1 if estimate.experts is None else estimate.experts.ep_size
    if ep_size > 1:
        yield f"# layers of experts: offload.moe.MoE(..., ep_size={ep_size})"
    if estimate.inference is not None:
        yield f'# offload.dispatch(model, "{_one_line(file_name)}", weights=FOLDER), or'
        yield f"# `offload generate FOLDER --config {_one_line(file_name)}`"
        yield ""
        return
    if case.source.train_model is not None and estimate.fits and ep_size == 1:
        yield from _train_lines(f"offload train {_one_line(file_name)}", profile)
    else:
        yield "# Use:"
    yield f'#   engine = offload.initialize(model, "{_one_line(file_name)}")'
    yield ""


def _train_lines(command: str, profile: HardwareProfile) -> Iterator[str]:
    if profile.ranks == 1:
        yield f"# Train with `{command}`, or in a loop of your own:"
        return
    nodes = ""
    if profile.nodes > 1:  # which have to find each other
        nodes = f"--nnodes {profile.nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 "
    yield f"# Train{' on every node' if nodes else ''} with"
    yield f"#   torchrun {nodes}--nproc-per-node {profile.ranks_per_node} -m {command}"
    yield "# or in a loop of your own:"


def _compute(estimate: Estimate) -> Iterator[str]:
    config = estimate.config
    where = "cuda" if estimate.plan.gpu else "cpu"
    yield _key("device", where, "where the model computes")
    what = f"parameters and gradients; master: {config.master}"
    if estimate.inference is not None:
        what = "of the weights, as the model computes with them"
    yield _key("precision", config.precision, what)
    if config.seed != _DEFAULTS.seed:
        yield _key("seed", config.seed, "of initialisation, data order and sampling")


def _budget(estimate: Estimate) -> Iterator[str]:
    """Yield the budgets of the plan, rounded to the side that is needed."""
    plan = estimate.plan
    yield ""
    yield "# most bytes each tier may hold; interpreter, libraries and activations come on top"
    yield "budget:"
    for tier in Tier:
        budget, needed = plan.budgets[tier], needed_nbytes(plan, tier)
        if not budget and not needed:
            continue
        whole = budget // _MIB * _MIB
        shown = budget if whole < needed or not whole else whole
        least = f"at least {format_bytes(needed)} needed" if needed else "nothing planned there"
        yield _key(str(tier), _size(shown), least, 1)


def _size(nbytes: int) -> str | int:
    for unit, name in ((1 << 30, "GiB"), (_MIB, "MiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return nbytes


def _nvme(estimate: Estimate, config: OffloadConfig) -> Iterator[str]:
    nvme, paths, advice = config.nvme, list(config.nvme.paths), ""
    if not paths and estimate.plan.opens_files:
        paths, advice = [str(machine.swap_folder())], ": name folders on the fastest disks"
    kinds = ", ".join(dict.fromkeys(map(_disk_kind, paths)))
    yield ""
    yield "nvme:"
    what = f"swap files, here on {kinds}{advice}" if paths else "nothing is planned on disk"
    yield _key("paths", paths, what, 1)
    for name, value in _changed(nvme.model_dump(mode="json"), _DEFAULTS.nvme, {"paths"}):
        yield _key(name, value, depth=1)


def _disk_kind(path: str) -> str:
    """Return `ext4`, or `tmpfs (this is RAM: name a folder on a disk in nvme.paths)`."""
    mount = machine.mount_of(Path(path).expanduser())
    if mount is None:
        return "an unknown file system"
    return f"{mount.kind} ({mount.remark})" if mount.remark else mount.kind


def _placement(estimate: Estimate) -> Iterator[str]:
    config, plan = estimate.config, estimate.plan
    dumped = config.placement.model_dump(mode="json", exclude_none=True)
    yield ""
    yield "placement:"
    trains = estimate.inference is None
    for placed, where in plan.placements.items():
        if not trains and class_of(placed) is not StateClass.PARAMETERS:
            continue
        if placed is ExpertClass.PARAMETERS:
            yield "  experts:"
        *above, name = placed.split(".")
        values = dumped.get("experts", {}) if above else dumped
        held = sum(home_nbytes(plan, placed, tier) for tier in Tier)
        value = values.get(name, str(where.tiers[0]))
        yield _key(name, value, f"{format_bytes(held)}", 1 + len(above))
    if not trains:
        return
    activations = config.placement.activations
    yield "  activations:"
    yield _key("tier", activations.tier, "where what forward saves waits for backward", 2)
    yield _key("checkpoint", activations.checkpoint, "recompute blocks in backward", 2)


def _optimizer(
    estimate: Estimate, asked: OffloadConfig, *, pretrained: bool
) -> Iterator[str]:  # fmt: skip
    update: dict[str, Any] = {"chunk": estimate.plan.chunk_numel, "master": asked.master}
    lr = "yours to choose"
    is_open = "lr" not in asked.optimizer.model_fields_set
    if pretrained and is_open and asked.optimizer.type == "adamw":
        update["lr"] = _PRETRAINED_LR
        lr = "usual for a pretrained model; from random weights 3e-4 would be"
    optimizer = asked.optimizer.model_copy(update=update)
    dumped = optimizer.model_dump(mode="json", exclude_none=True)
    texts = {
        "type": "", "lr": lr, "master": "what exact 16-bit training keeps beside",
        "states": "fp32 is exact; bf16 and int8 are approximations",
        "chunk": "elements per piece streamed in the update",
    }  # fmt: skip
    yield ""
    yield "optimizer:"
    default = _DEFAULTS.optimizer.model_dump(mode="json", exclude_none=True)
    for name, value in dumped.items():
        if name in texts or value != default.get(name):
            yield _key(name, value, texts.get(name, ""), 1)


def _step(estimate: Estimate) -> Iterator[str]:
    config = estimate.config
    passes = config.gradient_accumulation_steps
    yield ""
    if estimate.inference is None:
        if config.clip_grad_norm is not None:
            yield _key("clip_grad_norm", config.clip_grad_norm, "largest gradient norm")
        yield _key("gradient_accumulation_steps", passes, "backward passes per step")
    pieces = "pieces of a batch that each block runs over before the next"
    yield _key("micro_batches", max(1, config.micro_batches), pieces)
    yield _key("prefetch", config.prefetch, "groups fetched ahead")


def _rest(config: OffloadConfig) -> Iterator[str]:
    """Yield the keys that are not at their default, and have no text of their own."""
    said = {
        "device", "precision", "seed", "budget", "nvme", "placement", "optimizer", "clip_grad_norm",
        "gradient_accumulation_steps", "micro_batches", "prefetch", "train", "written_for",
    }  # fmt: skip
    dumped = config.model_dump(mode="json", exclude_none=True)
    rest = dict(_changed(dumped, _DEFAULTS, said))
    if rest:
        yield ""
        yield from dump_yaml(rest).rstrip("\n").splitlines()


def _written_for(estimate: Estimate, source: ModelSource) -> Iterator[str]:
    """Yield the model, if no `train:` section describes it."""
    if source.train_model is not None:
        return
    sequence = estimate.workload.sequence
    if estimate.inference is not None:
        sequence = estimate.inference.generation.prompt
    written = WrittenFor(
        model=_one_line(source.name), parameters=estimate.numel, source=source.location,
        batch=estimate.workload.batch, sequence=sequence,
    )  # fmt: skip
    yield ""
    yield "# what all of this was planned for; `offload plan` plans it again"
    yield from dump_yaml({"written_for": written.model_dump(exclude_none=True)}).splitlines()


def _train(estimate: Estimate, source: ModelSource) -> Iterator[str]:
    """Yield the `train:` section, if `offload train` can build this model."""
    if source.train_model is None:
        return
    work = estimate.workload
    given = source.config.train if source.config is not None else None
    train = given or TrainConfig(
        model=source.train_model.model_copy(
            update={"max_sequence": max(work.sequence, source.train_model.max_sequence)}
        ),
        sequence=work.sequence,
    )
    train = train.model_copy(update={"batch": work.batch, "sequence": work.sequence})
    yield ""
    yield "# `offload train`: the built-in model over bytes of text, to see that it works"
    values = train.model_dump(mode="json", exclude_none=True)
    default = TrainConfig().model_dump(mode="json", exclude_none=True)
    kept = {
        name: value
        for name, value in values.items()
        if name in ("model", "steps", "batch", "sequence") or value != default.get(name)
    }
    yield from dump_yaml({"train": kept}).rstrip("\n").splitlines()


def _changed(
    values: Mapping[str, Any], default: Any, without: set[str]
) -> Iterator[tuple[str, Any]]:
    usual = default.model_dump(mode="json", exclude_none=True)
    for name, value in values.items():
        if name not in without and value is not None and value != usual.get(name):
            yield name, value


def _key(name: str, value: Any, comment: str = "", depth: int = 0) -> str:
    text = f"{'  ' * depth}{name}: {dump_yaml(value, inline=True)}"
    return f"{text:<38}  # {comment}" if comment else text


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)[:200]
