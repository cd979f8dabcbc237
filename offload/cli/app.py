"""The commands and their options. Nothing heavy is imported here: `--help` answers at once."""

from pathlib import Path
from typing import Annotated

import typer

from offload.cli.bench import bench_app
from offload.cli.checkpoint import checkpoint_app
from offload.cli.config import File, Overrides, config_app, migrate_file
from offload.cli.errors import GuardedGroup, command_line, run
from offload.display.plain_text import echo
from offload.tiers.errors import UnsupportedError

_HELP = "Train models whose states are larger than the GPU, or larger than RAM."

app = command_line("offload", GuardedGroup, _HELP)


@app.command()
def train(
    file: File,
    option: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", metavar="DIR", help="Folder of the run. Default: runs/FILE-time."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint in --run-dir.")
    ] = False,
) -> None:
    """Train the built-in language model as FILE says."""
    from offload.train.loop import run_training

    run_training(file, option or [], run_dir, resume)


@app.command()
def generate(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL_FOLDER", help="A model in transformers' format.")
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")],
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The YAML configuration.")
    ] = None,
    option: Overrides = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Most tokens to generate; fewer at the context's end."
        ),
    ] = 128,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Choose the most likely token each time.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Random seed. Short for -o seed=.")
    ] = None,
    prompt_lookup: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Try N tokens a pass, found in the text so far."),
    ] = None,
) -> None:
    """Generate text to standard output, with a model whose weights are in the tiers."""
    from offload.cli.generate import run_generation
    from offload.config import OffloadConfig

    seeded = [] if seed is None else [f"seed={seed}"]
    loaded = OffloadConfig.load(config or {}, [*(option or []), *seeded])
    run_generation(folder, prompt, loaded, max_new_tokens, greedy=greedy, lookup=prompt_lookup)


@app.command()
def serve(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL_FOLDER", help="A model in transformers' format.")
    ],
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The YAML configuration.")
    ] = None,
    option: Overrides = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0: any free one.")
    ] = 8000,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most sequences that a pass computes.")
    ] = 32,
    queue: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most requests that wait; more get a 503.")
    ] = 128,
) -> None:
    """Serve a model whose weights are in the tiers by OpenAI's chat and completions endpoints."""
    try:
        from offload.integrations.transformers.openai_server import serve as serve_model
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"{missing.name} is not installed, which serving needs: pip install 'offload[serve]'"
        ) from None
    from offload.config import OffloadConfig

    loaded = OffloadConfig.load(config or {}, option or [])
    serve_model(folder, loaded, host=host, port=port, size=batch, waiting=queue)


@app.command()
def doctor(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH", help="Folders for swap files to check.")
    ] = None,
) -> None:
    """Report what this machine offers, what is missing, and how to fix it. The exit code is 1 if
    nothing can be trained."""
    from offload.cli.doctor import print_checks

    print_checks(paths or [])


@app.command()
def migrate(
    file: Annotated[
        Path, typer.Argument(metavar="DS_CONFIG", help="A configuration of DeepSpeed, JSON.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The YAML to write. Default: standard output."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that train together: divides train_batch_size."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
) -> None:
    """Convert a configuration of DeepSpeed to one of offload, and say what became of its keys."""
    migrate_file(file, out, ranks, replace=force)


@app.command()
def compress(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A model of transformers: config.json, safetensors."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    storage: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="Weights of linear layers and experts in int4, int8 or nf4."
        ),
    ],
    group_size: Annotated[int, typer.Option(metavar="N", help="Elements that share a scale.")] = 64,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Modules not to quantize. Repeatable; default: lm_head."),
    ] = None,
) -> None:
    """Write FOLDER's model to OUT with quantized weights, in files that from_pretrained opens.
    One tensor is in RAM at a time."""
    from offload.integrations.transformers.compress import compress as write_compressed
    from offload.tiers.units import format_bytes

    files = write_compressed(folder, out, storage=storage, group_size=group_size, skip=skip)
    nbytes = sum(file.stat().st_size for file in files)
    before = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    echo(f"wrote {out} ({format_bytes(nbytes)}; {folder} has {format_bytes(before)})")


app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process with its exit code."""
    run(app, arguments)
