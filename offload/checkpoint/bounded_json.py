"""JSON of files that anyone may have made: what parsing it takes is known before it is parsed.

A byte of text can become 30 bytes of objects (`[],[],...`). So values are counted first, by the
commas and brackets that separate them; those within texts count, too: it is an upper bound.
"""

from __future__ import annotations

import json
from typing import Any

MOST_NBYTES = 64 << 20
MOST_VALUES = 1_500_000  # with 300 bytes each, what pydantic makes of them included, 450 MB
_SEPARATORS = (b",", b"[", b"{")


def parse(raw: bytes | bytearray) -> Any:
    """ValueError for what is no JSON, nested too deeply, or larger than any of ours is."""
    check_size(raw)
    try:
        return json.loads(raw.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_size(raw: bytes | bytearray) -> None:
    """ValueError unless `parse` would take it."""
    count = sum(map(raw.count, _SEPARATORS))
    if len(raw) > MOST_NBYTES or count > MOST_VALUES:
        raise ValueError(
            f"{len(raw):,} bytes with {count:,} values are more than the {MOST_NBYTES:,} and "
            f"{MOST_VALUES:,} that any has"
        )
