"""`offload perplexity`: the perplexity of a folder's model on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.display.plain_text import echo
from offload.tiers.errors import ConfigError


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
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-o", "--option", metavar="KEY=VALUE", help="Replace a value of it. Repeatable."
        ),
    ] = None,
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
