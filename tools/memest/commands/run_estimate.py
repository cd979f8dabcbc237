"""`memest MODEL`: read, estimate, show, write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from offload.config import OffloadConfig
from offload.config.training import MOST_TOKENS
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Estimate
from offload.planning.plan.kv_plan import kv_in_tiers
from offload.planning.plan.workload import Generation, Workload
from offload.process import machine
from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.options import (
    EstimateOptions,
    MachineOptions,
    ModelOptions,
    OutputOptions,
    WorkOptions,
)
from offload.tools.memest.commands.output import show_answer, write_file
from offload.tools.memest.estimate.answer import estimate
from offload.tools.memest.estimate.case import Case, Question
from offload.tools.memest.hardware.profiles import HardwareProfile, without_gpus
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.source.model_source import ModelSource, SourceKind, UntraceableError
from offload.tools.memest.source.read_model import read_model, read_stated
from offload.tools.memest.source.stated_sizes import StatedSizes, parse_count

DOES_NOT_FIT = 1
_USUAL_SEQUENCE = 2048


def read_question(asked: EstimateOptions) -> Question:
    """Read all inputs of an answer. Raise ConfigError or PathError naming what is wrong."""
    named = _named_config(asked.work)
    source = source_of(asked.model, named)
    config, assumed = _config_of(asked, source, named)
    generation = None
    if asked.work.inference:
        generation, more = _generation_of(asked.work, source)
        workload = generation.usual
    else:
        workload, more = _workload_of(asked.work, source, config)
    profile = profile_of(asked.machine, config)
    speeds = speeds_of(profile, config, measure=source.has_graph and not asked.output.no_measure)
    # `offload train` takes every step it begins; whose loop the others are in is not known
    planned = config.owning_the_loop() if source.kind is SourceKind.YAML else config
    if generation is not None:
        planned = config.for_inference()
        planned, _ = kv_in_tiers(
            planned, source.shape, source.cache, generation.batch, generation.context
        )
    case = Case(source, planned, workload, profile, speeds, asked.work.ep_size, generation)
    case.check_ep_size()
    return Question(case, config, (*assumed, *more))


def answered(
    question: Question, answer: Callable[[Case], Estimate]
) -> tuple[Question, Estimate]:  # fmt: skip
    """Return the answer, with assumptions first among its notes; if the model's code cannot be
    followed, it is of the states alone, and says so."""
    try:
        found = answer(question.case)
    except UntraceableError as error:
        source = question.case.source.without_graph(str(error))
        question = replace(question, case=replace(question.case, source=source))
        found = answer(question.case)
    return question, replace(found, notes=(*question.assumed, *found.notes))


def run_estimate(asked: EstimateOptions) -> int:
    """Print or write the answer. Return 0 if the model fits, 1 if not."""
    others = machine.OtherPrograms()
    question, found = answered(read_question(asked), partial(estimate, advise=asked.output.advise))
    if question.case.profile.here and found.step is not None and others.note:
        found = replace(found, notes=(*found.notes, others.note))
    if asked.output.write is not None:  # before a reader of standard output goes away
        _write_config(found, question, asked.output.write)
    _show(found, asked.output)
    return 0 if found.fits else DOES_NOT_FIT


# ---------------------------------------------------------------- what is asked about
def _named_config(work: WorkOptions) -> OffloadConfig | None:
    return None if work.config is None else OffloadConfig.load(work.config, work.all_overrides)


def source_of(asked: ModelOptions, config: OffloadConfig | None = None) -> ModelSource:
    """Return the model that was named or stated; `config` may name its blocks."""
    if asked.source is not None:
        blocks = config.groups.blocks if config is not None else ()
        return read_model(asked.source, blocks=blocks)
    params = parse_count(asked.params) if asked.params is not None else None
    return read_stated(
        StatedSizes(
            params=params, layers=asked.layers, hidden=asked.hidden, heads=asked.heads,
            kv_heads=asked.kv_heads, mlp=asked.mlp, vocab=asked.vocab, tied=asked.tied,
        )
    )  # fmt: skip


def _config_of(
    asked: EstimateOptions, source: ModelSource, named: OffloadConfig | None
) -> tuple[OffloadConfig, list[str]]:
    """Return the configuration, and the assumptions in it."""
    overrides = asked.work.all_overrides
    if source.config is not None:
        if named is not None:
            raise ConfigError(
                f"--config {asked.work.config} contradicts {asked.model.source}, which is a "
                "configuration itself; leave one of them out"
            )
        config = OffloadConfig.load(Path(str(asked.model.source)), overrides)
        return config, []
    if named is not None:
        if named.written_for is not None:
            named.written_for.check(source.name, source.shape.numel)
        if asked.work.inference:
            return named.in_precision_of(source.precision), []
        return named, []
    own = source.precision if asked.work.inference else None
    precision = own or _usual_precision(asked)
    chosen = [f"precision={precision}", "placement.activations.checkpoint=auto"]
    config = OffloadConfig.load({}, [*chosen, *overrides])
    given = asked.work.precision is not None or any(
        text.partition("=")[0].strip() == "precision" for text in overrides
    )
    why = "as the weights are" if own is not None else "as none was asked for"
    return config, [] if given else [f"precision: {precision}, {why}"]


def _usual_precision(asked: EstimateOptions) -> str:
    """Return bf16 if it is fast: on a GPU, and on a CPU with instructions for it; else fp32."""
    gpu = asked.machine.gpu or asked.machine.profile
    fast = {"avx512f", "amx_bf16", "bf16", "asimddp"}
    return "bf16" if gpu not in (None, "none") or fast & machine.cpu_features() else "fp32"


def _workload_of(
    work: WorkOptions, source: ModelSource, config: OffloadConfig
) -> tuple[Workload, list[str]]:
    """Return the input of a step, and the assumptions in it."""
    # a configuration written for a model states its workload
    given = config.train if source.kind is SourceKind.YAML else config.written_for
    longest = min(_USUAL_SEQUENCE, source.context or _USUAL_SEQUENCE)
    batch = work.batch or (given.batch if given else 1)
    sequence = work.sequence or (given.sequence if given else longest)
    for option, value in (("--batch", work.batch), ("--sequence", work.sequence)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: at least 1")
    if batch * sequence > MOST_TOKENS:
        raise ConfigError(
            f"--batch {batch} with --sequence {sequence}: {batch * sequence:,} tokens in a pass; "
            f"at most {MOST_TOKENS:,}"
        )
    return Workload(batch, sequence, config.gradient_accumulation_steps), list(
        _workload_notes(work, source, Workload(batch, sequence), assumed=given is None)
    )


def _generation_of(work: WorkOptions, source: ModelSource) -> tuple[Generation, list[str]]:
    """Return the generation to plan for, and notes on assumptions and omissions."""
    found, assumed = Generation.asked(work.batch, work.prompt, work.new_tokens)
    notes = list(assumed)
    if source.context is not None and found.context >= source.context:
        notes.append(
            f"sequences get longer than the {source.context:,} tokens the model was made for"
        )
    if source.cache is None:
        notes.append("the cache of keys and values is not counted: what is cached is not known")
    return found, notes


def _workload_notes(
    work: WorkOptions, source: ModelSource, found: Workload, *, assumed: bool
) -> Iterator[str]:
    if assumed and work.batch is None:
        yield f"batch: {found.batch}, as none was asked for"
    if assumed and work.sequence is None:
        yield f"sequence: {found.sequence:,} tokens, as none was asked for"
    if source.context is not None and found.sequence > source.context:
        yield f"sequences are longer than the {source.context:,} tokens the model was made for"


# ---------------------------------------------------------------- the answer
def _show(found: Estimate, output: OutputOptions) -> None:
    from offload.tools.memest.show.estimate_page import estimate_page
    from offload.tools.memest.show.render_json import to_dict
    from offload.tools.memest.show.tables import page_table

    show_answer(
        output.chosen, output.out, table=lambda: page_table(estimate_page(found, drawn=False)),
        values=lambda: to_dict(found),
        page=lambda: estimate_page(found),
    )  # fmt: skip


def _write_config(found: Estimate, question: Question, path: Path) -> None:
    from offload.tools.memest.show.write_config import config_yaml

    case = question.case
    text = config_yaml(found, case, question.asked, str(path))
    write_file(path, text.encode(), "--write")
    print(f"wrote {path}", file=sys.stderr)


def profile_of(asked: MachineOptions, config: OffloadConfig) -> HardwareProfile:
    """Return the hardware to plan for. Raise ConfigError naming the option that is wrong."""
    paths = [Path(path).expanduser() for path in config.nvme.paths]
    profile = read_profile(**vars(asked), nvme_paths=paths)
    if config.device not in ("auto", "cpu") and not profile.gpu_nbytes:
        raise ConfigError(
            f"device: {config.device}, but this hardware has no GPU; name one with --gpu, or set "
            "-o device=cpu"
        )
    return without_gpus(profile) if config.device == "cpu" else profile


def speeds_of(
    profile: HardwareProfile, config: OffloadConfig, *, measure: bool
) -> Speeds | None:  # fmt: skip
    """Return one rank's speeds; with `measure`, this machine's are measured if they never were."""
    if not profile.here:
        return profile.speeds()
    paths = config.nvme.paths
    found = known_speeds(paths)
    if found is None and measure:
        print(
            "measuring this machine's speeds, once; --no-measure leaves times out ...",
            file=sys.stderr,
            flush=True,
        )
        found = machine_speeds(paths)
    return profile.speeds(found)
