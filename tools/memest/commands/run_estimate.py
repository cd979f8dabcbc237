"""`memest MODEL`: read, estimate, show, write."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from offload.config import OffloadConfig
from offload.config.training import MAX_TOKENS
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Workload
from offload.process import machine
from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.options import EstimateOptions
from offload.tools.memest.commands.output import show_answer
from offload.tools.memest.estimate.answer import estimate
from offload.tools.memest.estimate.case import Case, Question
from offload.tools.memest.estimate.result import Estimate
from offload.tools.memest.generation import Generation, kv_in_tiers
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.source.model_source import ModelSource, SourceKind, UntraceableError
from offload.tools.memest.source.read_model import read_model, read_stated
from offload.tools.memest.source.stated_sizes import StatedSizes, parse_count

DOES_NOT_FIT = 1
_USUAL_SEQUENCE = 2048


def read_question(asked: EstimateOptions) -> Question:
    """Read all inputs of an answer. Raise ConfigError or PathError naming what is wrong."""
    named = None
    if asked.config is not None:
        named = OffloadConfig.load(asked.config, asked.overrides or ())
    source = source_of(asked, named)
    config, assumed = _config_of(asked, source, named)
    generation = None
    if asked.inference:
        generation, more = _generation_of(asked, source)
        workload = generation.usual
    else:
        workload, more = _workload_of(asked, source, config)
    profile = profile_of(asked, config)
    speeds = speeds_of(profile, config, measure=source.has_graph and not asked.no_measure)
    # `offload train` takes every step it begins; whose loop the others are in is not known
    planned = config.owning_the_loop() if source.kind is SourceKind.YAML else config
    if generation is not None:
        planned = config.for_inference()
        planned, _ = kv_in_tiers(
            planned, source.shape, source.cache, generation.batch, generation.context
        )
    case = Case(source, planned, workload, profile, speeds, generation)
    return Question(case, config, (*assumed, *more))


def answered(question: Question, answer: Callable[[Case], Estimate]) -> tuple[Question, Estimate]:
    """Return the answer, with assumptions first among its notes; if the model's code cannot be
    followed, it is of the states alone, and says so."""
    try:
        result = answer(question.case)
    except UntraceableError as error:
        source, note = question.case.source, "activations are not counted, and there are no times"
        source = replace(source, build=None, notes=(*source.notes, f"{note}: {error}"))
        question = replace(question, case=replace(question.case, source=source))
        result = answer(question.case)
    return question, replace(result, notes=(*question.assumed, *result.notes))


def run_estimate(asked: EstimateOptions) -> int:
    """Print or write the answer. Return 0 if the model fits, 1 if not."""
    from offload.checkpoint.format.disk import write_named
    from offload.tools.memest.show.estimate_page import estimate_page
    from offload.tools.memest.show.render_json import to_dict
    from offload.tools.memest.show.render_terminal import page_table
    from offload.tools.memest.show.write_config import config_yaml

    question, result = answered(read_question(asked), estimate)
    if asked.write is not None:  # before a reader of standard output goes away
        text = config_yaml(result, question.case, question.asked, str(asked.write))
        write_named(asked.write, text, "--write")
        print(f"wrote {asked.write}", file=sys.stderr)
    show_answer(
        asked.chosen_format,
        asked.out,
        table=lambda: page_table(estimate_page(result)),
        values=lambda: to_dict(result),
        page=lambda: estimate_page(result),
    )
    return 0 if result.fits else DOES_NOT_FIT


# ---------------------------------------------------------------- what is asked about
def source_of(asked: EstimateOptions, config: OffloadConfig | None = None) -> ModelSource:
    """Return the model that was named or stated; `config` may name its blocks."""
    if asked.source is not None:
        return read_model(asked.source, blocks=config.groups.blocks if config is not None else ())
    params = parse_count(asked.params) if asked.params is not None else None
    return read_stated(StatedSizes(params, asked.layers, asked.hidden, asked.vocab))


def _config_of(
    asked: EstimateOptions, source: ModelSource, named: OffloadConfig | None
) -> tuple[OffloadConfig, list[str]]:
    overrides = asked.overrides or ()
    if source.config is not None:
        if named is not None:
            raise ConfigError(
                f"--config {asked.config} contradicts {asked.source}, which is a "
                "configuration itself; leave one of them out"
            )
        config = OffloadConfig.load(Path(str(asked.source)), overrides)
        return config, []
    if named is not None:
        if named.written_for is not None:
            named.written_for.check(source.name, source.shape.numel)
        if asked.inference:
            return named.in_precision_of(source.precision), []
        return named, []
    own = source.precision if asked.inference else None
    # bf16 where it is fast: on a GPU, and on a CPU with instructions for it
    fast = {"avx512f", "amx_bf16", "bf16", "asimddp"} & machine.cpu_features()
    precision = own or ("bf16" if asked.gpu not in (None, "none") or fast else "fp32")
    chosen = [f"precision={precision}", "placement.activations.checkpoint=auto"]
    config = OffloadConfig.load({}, [*chosen, *overrides])
    given = any(text.partition("=")[0].strip() == "precision" for text in overrides)
    why = "as the weights are" if own is not None else "as none was asked for"
    return config, [] if given else [f"precision: {precision}, {why}"]


def _workload_of(
    asked: EstimateOptions, source: ModelSource, config: OffloadConfig
) -> tuple[Workload, list[str]]:
    """Return the input of a step, and the assumptions in it."""
    # a configuration written for a model states its workload
    given = config.train if source.kind is SourceKind.YAML else config.written_for
    longest = min(_USUAL_SEQUENCE, source.context or _USUAL_SEQUENCE)
    batch = asked.batch or (given.batch if given else 1)
    sequence = asked.sequence or (given.sequence if given else longest)
    if batch * sequence > MAX_TOKENS:
        raise ConfigError(
            f"--batch {batch} with --sequence {sequence}: {batch * sequence:,} tokens in a pass; "
            f"at most {MAX_TOKENS:,}"
        )
    work = Workload(batch, sequence, config.gradient_accumulation_steps)
    return work, list(_workload_notes(asked, source, work, assumed=given is None))


def _generation_of(asked: EstimateOptions, source: ModelSource) -> tuple[Generation, list[str]]:
    """Return the generation to plan for, and notes on assumptions and omissions."""
    generation, assumed = Generation.asked(asked.batch, asked.prompt, asked.new_tokens)
    notes = list(assumed)
    if source.context is not None and generation.context >= source.context:
        notes.append(
            f"sequences get longer than the {source.context:,} tokens the model was made for"
        )
    blocks = sum(unit.repeated for unit in source.shape.units)
    if source.cache is None:
        notes.append("the cache of keys and values is not counted: what is cached is not known")
    elif blocks > len(source.cache.layers):
        others = blocks - len(source.cache.layers)
        notes.append(
            f"{others} of {blocks} layers cache no keys and values; states are not counted"
        )
    return generation, notes


def _workload_notes(
    asked: EstimateOptions, source: ModelSource, workload: Workload, *, assumed: bool
) -> Iterator[str]:
    if assumed and asked.batch is None:
        yield f"batch: {workload.batch}, as none was asked for"
    if assumed and asked.sequence is None:
        yield f"sequence: {workload.sequence:,} tokens, as none was asked for"
    if source.context is not None and workload.sequence > source.context:
        yield f"sequences are longer than the {source.context:,} tokens the model was made for"


def profile_of(asked: EstimateOptions, config: OffloadConfig) -> HardwareProfile:
    """Return the hardware to plan for. Raise ConfigError naming the option that is wrong."""
    profile = read_profile(
        asked.gpu, asked.ram, asked.nvme, asked.gpus, asked.nodes, ssd=asked.ssd,
        nvme_paths=[Path(path).expanduser() for path in config.nvme.paths],
    )  # fmt: skip
    if config.device not in ("auto", "cpu") and not profile.gpu_nbytes:
        raise ConfigError(
            f"device: {config.device}, but this hardware has no GPU; name one with --gpu, or set "
            "-o device=cpu"
        )
    return profile.without_gpus() if config.device == "cpu" else profile


def speeds_of(profile: HardwareProfile, config: OffloadConfig, *, measure: bool) -> Speeds | None:
    """Return one rank's speeds; with `measure`, this machine's are measured if they never were."""
    if not profile.here:
        return profile.speeds()
    paths = config.nvme.paths
    speeds = known_speeds(paths)
    if speeds is None and measure:
        print(
            "measuring this machine's speeds, once; --no-measure leaves times out ...",
            file=sys.stderr,
            flush=True,
        )
        speeds = machine_speeds(paths)
    return profile.speeds(speeds)
