"""`offload compress`, and its options for other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.display.plain_text import echo

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
