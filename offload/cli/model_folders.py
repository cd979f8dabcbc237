"""Commands on a folder of a transformers model: `offload compress` and `offload perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli.config import Overrides
from offload.display.plain_text import echo
from offload.tiers.errors import ConfigError

Storage = typer.Option(
    metavar="CODES", help="Weights of linear layers and experts in int4, int8 or nf4."
)
GroupSize = Annotated[int, typer.Option(metavar="N", help="Elements that share a scale.")]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Modules that stay as they are. Repeatable; default: lm_head."
    ),
]


def compress(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A model of transformers: config.json, safetensors."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    storage: Annotated[str, Storage],
    group_size: GroupSize = 64,
    skip: Skip = None,
) -> None:
    """Write FOLDER's model to OUT with quantised weights, in files that from_pretrained opens.
    One tensor is in RAM at a time."""
    from offload.integrations.transformers.compress import compress as run
    from offload.tiers.units import format_bytes

    files = run(folder, out, storage=storage, group_size=group_size, skip=skip)
    nbytes = sum(file.stat().st_size for file in files)
    before = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    echo(f"wrote {out} ({format_bytes(nbytes)}; {folder} has {format_bytes(before)})")


def perplexity(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A model of transformers and its tokenizer.")
    ],
    text: Annotated[
        Path, typer.Argument(metavar="TEXT", exists=True, dir_okay=False, help="A text, UTF-8.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A YAML configuration: budgets, placement, storage."),
    ] = None,
    option: Overrides = None,
    window: Annotated[int, typer.Option(metavar="TOKENS", help="Seen at once.")] = 1024,
    stride: Annotated[
        int, typer.Option(metavar="TOKENS", help="From the start of one window to the next.")
    ] = 512,
    batch: Annotated[int, typer.Option(metavar="N", help="Windows computed together.")] = 1,
) -> None:
    """Print the perplexity of FOLDER's model on TEXT. The model computes from the tiers, as
    offload.dispatch spreads it."""
    from offload.config import OffloadConfig
    from offload.inference import dispatch, dispatched
    from offload.integrations.perplexity import perplexity as run
    from offload.integrations.transformers.pretrained import open_pretrained

    loaded = OffloadConfig.load({} if config is None else config, option or [])
    tokens = _tokens(folder, text)
    model = dispatch(open_pretrained(folder), loaded)
    with dispatched(model):
        found = run(model, tokens, window=window, stride=stride, batch=batch)
    echo(
        f"perplexity {found.value:.4f} ({found.loss:.4f} nats per token) on {found.tokens:,} "
        f"tokens of {text.name}; windows of {window}, stride {stride}"
    )


def _tokens(folder: Path, text: Path) -> list[int]:
    import transformers

    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{text} is no UTF-8 text: {error}") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no tokenizer: {str(error)[:200]}") from None
    found: list[int] = tokenizer(content, verbose=False)["input_ids"]
    return found
