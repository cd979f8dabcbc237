"""`offload compress`: a folder of transformers made smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.display.plain_text import echo
from offload.tiers.errors import ConfigError

Storage = Annotated[
    str | None,
    typer.Option(
        metavar="CODES", help="Weights of linear layers and experts in int4, int8 or nf4."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="LIBRARY",
        help="Whose files have the codes: compressed-tensors, gptq, awq; nf4: bitsandbytes.",
    ),
]  # fmt: skip
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
    layers: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Blocks that are kept, from 0: 0,2,4 or 0-11,20."),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Zeros in linear layers and experts: 2:4, or a share of each (30%).",
        ),
    ] = None,
    storage: Storage = None,
    group_size: GroupSize = 64,
    skip: Skip = None,
    library: Format = None,
) -> None:
    """Write FOLDER's model to OUT with fewer blocks, pruned or quantised weights, in files that
    from_pretrained opens. One tensor is in RAM at a time."""
    from offload.integrations.compress import compress as run
    from offload.tiers.units import format_bytes

    kept = None if layers is None else _numbers(layers)
    files = run(
        folder, out, layers=kept, prune=prune, storage=storage, group_size=group_size,
        skip=skip, format=library,
    )  # fmt: skip
    nbytes = sum(file.stat().st_size for file in files)
    before = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    echo(f"wrote {out} ({format_bytes(nbytes)}; {folder} has {format_bytes(before)})")


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 12:
            raise ConfigError(f"--layers {text!r:.60}: write numbers, as 0,2,4 or 0-11,20")
        found += range(int(first), int(last or first) + 1)[:100_000]
    return found
