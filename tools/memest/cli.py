"""The `memest` command: its words and options. Nothing heavy is imported here."""

from __future__ import annotations

import atexit
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from offload import __version__
from offload.cli.errors import EXIT_BAD_INPUT, failing_io
from offload.tools.memest.cli_group import DEFAULT, MemestGroup
from offload.tools.memest.options import (
    EstimateOptions,
    Format,
    MachineOptions,
    ModelOptions,
    OutputOptions,
    Precision,
    Recompute,
    WorkOptions,
)

_HELP = """Say what training a model takes: memory by place, seconds per step, and what to change.

MODEL is a Hugging Face config.json or model folder, a safetensors file or index, module:function, \
or an offload YAML; nothing of a model folder is executed.

Exit code: 0 fits, 1 does not, 2 bad input.
"""

app = typer.Typer(
    name="memest",
    cls=MemestGroup,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODEL, _WORK, _MACHINE, _ANSWER = "Model", "Work", "Hardware", "Answer"

Source = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", show_default=False, help="Where the model is described."),
]
Params = Annotated[
    str | None,
    typer.Option(metavar="NUMBER", rich_help_panel=_MODEL, help="Parameters, like 7e9 or 7B."),
]
Layers = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Blocks.")]
Hidden = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Width.")]
Heads = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Attention heads.")]
KvHeads = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Key/value heads.")]
Mlp = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Width of the MLP.")]
Vocab = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Vocabulary.")]
Tied = Annotated[
    bool, typer.Option("--tied", rich_help_panel=_MODEL, help="One matrix for both ends.")
]

Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", rich_help_panel=_WORK, help="An offload YAML for the model."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--option", metavar="KEY=VALUE", rich_help_panel=_WORK,
        help="Set a key of the configuration, for example -o placement.optimizer=nvme. Repeatable.",
    ),
]  # fmt: skip
Batch = Annotated[int | None, typer.Option(rich_help_panel=_WORK, help="Sequences per pass.")]
Sequence = Annotated[int | None, typer.Option(rich_help_panel=_WORK, help="Tokens of each.")]
Accumulate = Annotated[int | None, typer.Option(rich_help_panel=_WORK, help="Passes per step.")]
PrecisionOption = Annotated[
    Precision | None, typer.Option("--precision", rich_help_panel=_WORK, help="Of the weights.")
]
Checkpoint = Annotated[
    Recompute | None,
    typer.Option("--checkpoint", rich_help_panel=_WORK, help="Recompute activations."),
]

Gpu = Annotated[
    str | None,
    typer.Option(metavar="SIZE|NAME", rich_help_panel=_MACHINE, help="24GiB, 'RTX 4090', or none."),
]
Ram = Annotated[str | None, typer.Option(metavar="SIZE", rich_help_panel=_MACHINE, help="64GiB.")]
Reserve = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", rich_help_panel=_MACHINE,
        help="Of --ram, kept for the system (default 2GiB); 0 in a container.",
    ),
]  # fmt: skip
Nvme = Annotated[
    str | None, typer.Option(metavar="SIZE", rich_help_panel=_MACHINE, help="Free disk, 1TiB.")
]
Ssd = Annotated[
    str | None,
    typer.Option(metavar="NAME", rich_help_panel=_MACHINE, help="'Gen4 SSD', '4 x Gen5 SSD'."),
]
Gpus = Annotated[int | None, typer.Option(rich_help_panel=_MACHINE, help="GPUs per node.")]
Nodes = Annotated[int | None, typer.Option(rich_help_panel=_MACHINE, help="Nodes.")]
Profile = Annotated[
    str | None,
    typer.Option(metavar="NAME", rich_help_panel=_MACHINE, help="A machine of `memest profiles`."),
]

FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format", rich_help_panel=_ANSWER, help="Default: what --out's name says, else table."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", rich_help_panel=_ANSWER, help="Instead of standard output."),
]
Dark = Annotated[bool, typer.Option("--dark", rich_help_panel=_ANSWER, help="A dark PNG.")]
Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=_ANSWER, help="Write a configuration to train with."
    ),
]
Force = Annotated[
    bool, typer.Option("--force", rich_help_panel=_ANSWER, help="Replace the file of --write.")
]
NoMeasure = Annotated[
    bool,
    typer.Option(
        "--no-measure", rich_help_panel=_ANSWER,
        help="No times, rather than measuring this machine (once, some seconds).",
    ),
]  # fmt: skip

Advise = Annotated[
    bool,
    typer.Option(
        "--advise", rich_help_panel=_ANSWER, help="Say what would make a step faster, too."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memest {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def _asked(
    source: Source = None, params: Params = None, layers: Layers = None, hidden: Hidden = None,
    heads: Heads = None, kv_heads: KvHeads = None, mlp: Mlp = None, vocab: Vocab = None,
    tied: Tied = False,
    config: Config = None, option: Overrides = None, batch: Batch = None,
    sequence: Sequence = None, accumulate: Accumulate = None, precision: PrecisionOption = None,
    checkpoint: Checkpoint = None,
    gpu: Gpu = None, ram: Ram = None, reserve: Reserve = None, nvme: Nvme = None, ssd: Ssd = None,
    gpus: Gpus = None,
    nodes: Nodes = None, profile: Profile = None,
    output_format: FormatOption = None, out: Out = None, dark: Dark = False, write: Write = None,
    force: Force = False, no_measure: NoMeasure = False,
    advise: Advise = False,
) -> EstimateOptions:  # fmt: skip
    """The options of every command that asks about one model, checked against each other."""
    asked = EstimateOptions(
        model=ModelOptions(
            source=source, params=params, layers=layers, hidden=hidden, heads=heads,
            kv_heads=kv_heads, mlp=mlp, vocab=vocab, tied=tied,
        ),
        work=WorkOptions(
            config=config, overrides=tuple(option or ()), batch=batch, sequence=sequence,
            accumulate=accumulate, precision=precision, checkpoint=checkpoint,
        ),
        machine=MachineOptions(
            gpu=gpu, ram=ram, reserve=reserve, nvme=nvme, ssd=ssd, gpus=gpus, nodes=nodes,
            profile=profile,
        ),
        output=OutputOptions(
            format=output_format, out=out, dark=dark, write=write, force=force,
            measure=not no_measure, advise=advise,
        ),
    )  # fmt: skip
    asked.check()
    return asked


def _asking(run: Callable[[EstimateOptions], int]) -> Callable[..., None]:
    """A command with all options of `_asked` that ends with the exit code of `run`."""

    @functools.wraps(_asked)
    def command(**given: Any) -> None:
        raise typer.Exit(run(_asked(**given)))

    command.__doc__ = run.__doc__
    return command


def _estimate(asked: EstimateOptions) -> int:
    """What training MODEL takes: memory by place, seconds per step, and what to change."""
    from offload.tools.memest.run_estimate import run_estimate

    return run_estimate(asked)


def _compare(asked: EstimateOptions) -> int:
    """MODEL under DDP, ZeRO, FSDP, ZeRO-Offload, ZeRO-Infinity and offload, side by side."""
    from offload.tools.memest.run_systems import run_compare

    return run_compare(asked)


def _scale(asked: EstimateOptions) -> int:
    """MODEL on 1 to 4096 GPUs of a named machine (--profile), simulated: bytes, collectives, steps.

    --nodes is the most machines; -o zero.stage and -o zero.shard_group say what is sharded.
    """
    from offload.tools.memest.run_scale import run_scale

    return run_scale(asked)


app.command(DEFAULT, hidden=True)(_asking(_estimate))
app.command("compare")(_asking(_compare))
app.command("scale")(_asking(_scale))


@app.command("max")
def largest(
    family: Annotated[str, typer.Argument(help="llama, gpt or moe.")] = "llama",
    batch: Annotated[int, typer.Option(rich_help_panel=_WORK, help="Sequences per pass.")] = 1,
    sequence: Annotated[int, typer.Option(rich_help_panel=_WORK, help="Tokens of each.")] = 2048,
    gpu: Gpu = None, ram: Ram = None, reserve: Reserve = None, nvme: Nvme = None, ssd: Ssd = None,
    gpus: Gpus = None,
    nodes: Nodes = None, profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """The largest model of FAMILY that trains on the hardware, under every system."""
    machine = MachineOptions(
        gpu=gpu, ram=ram, reserve=reserve, nvme=nvme, ssd=ssd, gpus=gpus, nodes=nodes,
        profile=profile,
    )  # fmt: skip
    machine.check()
    from offload.tools.memest.run_systems import run_max

    raise typer.Exit(run_max(family, machine, batch, sequence, as_json=as_json))


@app.command()
def history() -> None:
    """Published capacities of other systems, computed again, with their sources."""
    from offload.tools.memest.run_systems import print_history

    print_history()


@app.command()
def deepspeed(
    source: Source = None,
    params: Params = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    mlp: Mlp = None,
    vocab: Vocab = None,
    tied: Tied = False,
    largest_layer: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Parameters of the largest module.")
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=2, max=3, help="ZeRO stage. Default: both.")
    ] = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
) -> None:
    """What DeepSpeed's own estimator says, figure for figure."""
    asked = _asked(
        source=source, params=params, layers=layers, hidden=hidden, heads=heads,
        kv_heads=kv_heads, mlp=mlp, vocab=vocab, tied=tied, gpus=gpus, nodes=nodes,
    )  # fmt: skip
    from offload.tools.memest.run_systems import run_deepspeed

    raise typer.Exit(run_deepspeed(asked, stage, largest_layer))


@app.command()
def profiles() -> None:
    """List the GPUs, links, SSDs and machines known by name, with their sources."""
    from offload.tools.memest.run_profiles import print_profiles

    print_profiles()


@app.command()
def check(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Of `offload train`, or a run_folder.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Predicted against measured for a run, per tier and for time."""
    from offload.tools.memest.run_check import print_check

    print_check(run, as_json=as_json)


@app.command()
def calibrate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Folders for swap files. Default: a temporary."),
    ] = None,
) -> None:
    """Measure this machine's speeds again, and keep them."""
    from offload.tools.memest.run_calibrate import measure_again

    measure_again(paths or [])


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Python's collector would go again and again through all that is imported here and never
    freed: a seventh of a first answer."""
    before = gc.get_threshold()
    gc.set_threshold(1 << 18, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _end_without_collecting() -> None:
    """As the interpreter ends, the collector would go through all of torch once more."""
    if "triton" not in sys.modules:  # that complains of what is not collected
        gc.freeze()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process with its exit code."""
    atexit.register(_end_without_collecting)
    words = sys.argv[1:] if arguments is None else arguments
    # --debug is understood anywhere
    debug = "--debug" in words
    with failing_io(debug=debug, failed=EXIT_BAD_INPUT), _collecting_seldom():
        app(args=[word for word in words if word != "--debug"], prog_name="memest", obj=debug)
