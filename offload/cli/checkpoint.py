"""`offload checkpoint`: inspect, verify, convert and export the folders that a run has saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offload.cli.errors import EXIT_FAILED, GuardedGroup, print_error
from offload.display.plain_text import echo

if TYPE_CHECKING:
    from rich.table import Table

    from offload.checkpoint.format.manifest import Manifest, ParameterRecord

checkpoint_app = typer.Typer(
    cls=GuardedGroup, help="Inspect, verify and export checkpoints.", no_args_is_help=True
)

Folder = Annotated[
    Path, typer.Argument(metavar="PATH", exists=True, help="The folder of a checkpoint.")
]


@checkpoint_app.command()
def inspect(path: Folder) -> None:
    """Print the content of PATH: groups, parameters, bytes, steps. Only the manifest is read."""
    from offload.checkpoint.format.reader import CheckpointReader
    from offload.display.console import PlainConsole

    with CheckpointReader(path) as reader:
        manifest = reader.manifest
    console = PlainConsole()
    for line in _summary(manifest):
        console.print(line, soft_wrap=True)
    console.print(_groups(manifest))


@checkpoint_app.command()
def verify(path: Folder) -> None:
    """Compare every byte of PATH with its hash. The exit code is 1, and the damage is named, if a
    byte differs."""
    from offload.checkpoint.format.reader import CheckpointReader
    from offload.tiers.units import format_bytes

    with CheckpointReader(path) as reader:
        problems = list(reader.problems(contents=True))
        files, nbytes = len(reader.manifest.files), reader.manifest.nbytes
        base = reader.manifest.base
    for problem in problems:
        print_error(problem)
    if problems:
        raise typer.Exit(EXIT_FAILED)
    beside = "" if base is None else f", for the frozen base {base.name}, which is not in it"
    echo(f"{path} is whole: {files} files, {format_bytes(nbytes)}{beside}")


@checkpoint_app.command()
def export(
    path: Folder,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new OUT.safetensors, or a new folder of them.")
    ],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Format of the weights. fp32: masters. Default: the model's."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder with the tokenizer's files. Default: the model's source."
        ),
    ] = None,
) -> None:
    """Write the model of PATH to OUT, in safetensors files that any program reads. A folder OUT of
    a transformers model is one that from_pretrained opens. A checkpoint saved with frozen=False
    gives OUT.safetensors alone, with the trained parameters."""
    from offload.checkpoint.foreign.exporting import export as run
    from offload.tiers.units import format_bytes

    files = run(path, out, dtype, source)
    nbytes = sum(file.stat().st_size for file in files)
    echo(f"wrote {out} ({format_bytes(nbytes)})")
    others = [file.name for file in files if file.suffix != ".safetensors"]
    if others:
        echo(f"with {', '.join(others)}")
    if "config.json" in others and not any(name.startswith("tokenizer") for name in others):
        echo("without a tokenizer: --source FOLDER names the folder that has its files")


@checkpoint_app.command("import-deepspeed")
def import_deepspeed(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", exists=True, help="A folder that DeepSpeed saved, or one of its tags."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for TAG and latest.")],
    trust: Annotated[
        bool,
        typer.Option("--trust", help="PATH's files are pickles: say that you trust their source."),
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Optimizer type, for a PATH without its name."),
    ] = None,
    tied: Annotated[
        list[str] | None,
        typer.Option(metavar="ALIAS=NAME", help="A tied parameter that PATH does not record."),
    ] = None,
) -> None:
    """Convert a ZeRO checkpoint of DeepSpeed (stages 1 to 3) to offload's format, to train on."""
    from offload.deepspeed.importing import import_checkpoint
    from offload.tiers.errors import ConfigError

    if not trust:
        raise ConfigError(
            f"{path}: it holds pickles, which can be made to run code; add --trust if you know "
            "where they come from"
        )
    pairs = [each.partition("=")[::2] for each in tied or []]
    if not all(alias and name for alias, name in pairs):
        raise ConfigError("--tied: write ALIAS=NAME, for example lm_head.weight=embed.weight")
    target = import_checkpoint(path, out, kind=optimizer, tied=dict(pairs))
    echo(f"wrote {target}")


def _summary(manifest: Manifest) -> list[str]:
    from offload.tiers.units import format_bytes

    optimizer = manifest.optimizer
    skipped = f", {manifest.steps_skipped} skipped" if manifest.steps_skipped else ""
    lines = [
        f"step {manifest.steps_taken}{skipped}; precision {manifest.precision}, "
        f"optimizer {optimizer.type}, master {optimizer.master}",
        f"format {manifest.version}, written by offload {manifest.offload}, "
        f"{len(manifest.files)} files, {format_bytes(manifest.nbytes)}",
    ]
    for number, group in enumerate(optimizer.param_groups):
        numbers = ", ".join(f"{key:.80} {value!s:.80}" for key, value in group.numbers.items())
        lines.append(f"param group {number}: {len(group.params)} parameters, {numbers}")
    if manifest.base is not None:
        base = manifest.base
        lines.append(f"without its frozen base: {len(base.xxh3)} parameters, XXH3 {base.name}")
    if manifest.loss_scale is not None:
        lines.append(f"loss scale {manifest.loss_scale.scale:g}")
    if manifest.run is not None:
        ranks = len(manifest.run.named("random"))
        beside = f"random numbers of {ranks} rank{'' if ranks == 1 else 's'}"
        registered = dict.fromkeys(key.partition("/")[2] for key in manifest.run.named("objects"))
        lines.append(beside + (f"; registered: {', '.join(registered)}" if registered else ""))
    return lines


def _groups(manifest: Manifest) -> Table:
    from offload.display.console import table
    from offload.tiers.units import format_bytes

    heads = ("group", "tensors", "parameters", "trainable", "weights", "optimizer", "updates")
    shown = table(*heads, numbers=range(1, len(heads)))
    for index, group in enumerate(manifest.groups):
        records = [record for record in manifest.parameters if record.group == index]
        trained = [record for record in records if record.trainable]
        sizes = [
            format_bytes(manifest.files[name].nbytes) if name is not None else "-"
            for name in (group.parameters, group.optimizer)
        ]
        shown.add_row(
            group.name or "(root)", str(len(records)), _numel(records), _numel(trained), *sizes,
            _spread([record.steps for record in trained]),
        )  # fmt: skip
    return shown


def _numel(records: Sequence[ParameterRecord]) -> str:
    return f"{sum(math.prod(record.shape) for record in records):,}"


def _spread(steps: list[int]) -> str:
    if not steps:
        return "-"
    return str(steps[0]) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"
