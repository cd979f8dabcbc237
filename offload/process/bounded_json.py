"""JSON of files from any source: what parsing it takes is known before it is parsed.

A byte of text can become 30 bytes of objects (`[],[],...`). So values are counted first, by the
commas and brackets that separate them; those within texts count, too: it is an upper bound.
"""

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from offload.tiers.errors import ConfigError, PathError

MAX_NBYTES = 64 << 20
MAX_VALUES = 1_500_000  # with 300 bytes each, what pydantic makes of them included, 450 MB
_SEPARATORS = (b",", b"[", b"{")


def read(path: Path) -> Any:
    """The value in a JSON file. ValueError like `parse`, and for no regular file; OSError."""
    return parse(_content(path))


def read_named(path: Path, what: str) -> Any:
    """The value in a JSON file that a user named as `what`, in which a key given twice is an error,
    `NaN` and `Infinity` are none. Raise PathError if it cannot be read, ConfigError, naming the
    line where there is one, if it is not JSON or too much of it."""
    try:
        raw = _content(path)
        check_size(raw)
    except OSError as error:
        raise PathError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: too much for {what}: {error}") from None
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_without_doubles)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not JSON: byte {error.start} is no UTF-8 text") from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(raw.rstrip()) or error.msg.startswith("Unterminated string")
        hint = "the file ends too early" if cut else "it allows no comments or trailing commas"
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}; {hint}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep for {what}") from None
    except ValueError as error:  # a key given twice, a number with thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice[:80]!r} is given twice")
    return values


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        check_nbytes(status.st_size)
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_NBYTES + 1)
    finally:
        os.close(fd)


def parse(raw: bytes | bytearray) -> Any:
    """The value of a JSON text. ValueError if it is invalid, nested too deeply, or too large."""
    check_size(raw)
    try:
        return json.loads(raw.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_size(raw: bytes | bytearray) -> None:
    """Raise ValueError unless `parse` would accept the size."""
    check_nbytes(len(raw))
    count = sum(map(raw.count, _SEPARATORS))
    if count > MAX_VALUES:
        raise ValueError(f"{count:,} values are more than the {MAX_VALUES:,} that any has")


def check_nbytes(nbytes: int) -> None:
    """Raise ValueError for a file that is too long to be read."""
    if nbytes > MAX_NBYTES:
        raise ValueError(f"{nbytes:,} bytes are more than the {MAX_NBYTES:,} that any has")
