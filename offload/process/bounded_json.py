"""JSON of files from any source: what parsing it takes is known before it is parsed.

A byte of text can become 30 bytes of objects (`[],[],...`). So values are counted first, by the
commas and brackets that separate them; those within texts count, too: it is an upper bound.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_NBYTES = 64 << 20
MOST_VALUES = 1_500_000  # with 300 bytes each, what pydantic makes of them included, 450 MB
_SEPARATORS = (b",", b"[", b"{")


def read(path: Path) -> Any:
    """The value in a JSON file. ValueError like `parse`, and for no regular file; OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        check_nbytes(status.st_size)
        with open(fd, "rb", closefd=False) as file:
            return parse(file.read(MOST_NBYTES + 1))
    finally:
        os.close(fd)


def parse(raw: bytes | bytearray) -> Any:
    """The value of a JSON text. ValueError if invalid, nested too deeply, or too large for ours."""
    check_size(raw)
    try:
        return json.loads(raw.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_size(raw: bytes | bytearray) -> None:
    """Raise ValueError unless `parse` would accept the size."""
    check_nbytes(len(raw))
    count = sum(map(raw.count, _SEPARATORS))
    if count > MOST_VALUES:
        raise ValueError(f"{count:,} values are more than the {MOST_VALUES:,} that any has")


def check_nbytes(nbytes: int) -> None:
    """Raise ValueError for a file that is too long to be read."""
    if nbytes > MOST_NBYTES:
        raise ValueError(f"{nbytes:,} bytes are more than the {MOST_NBYTES:,} that any has")
