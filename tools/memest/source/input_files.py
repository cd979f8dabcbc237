"""Files that a user names: they are opened for reading only, up to a size, and never executed.

Formats that hold code (pickles, PyTorch's zip archives) are known by their first bytes and refused
unopened.
"""

import os
import stat
from pathlib import Path
from typing import Any

from offload.process import bounded_json
from offload.tiers.errors import ConfigError, PathError

_NOT_OPENED = "may hold code and is not opened; name the config.json, or convert to safetensors"
_MAGIC = {
    b"PK\x03\x04": f"a zip archive, as torch.save writes it: it {_NOT_OPENED}",
    b"\x1f\x8b": "gzip-compressed; unpack it first",
    b"GGUF": "a GGUF file, made for inference; name the config.json of the model it was made from",
    b"\x89HDF": f"an HDF5 file (Keras): it {_NOT_OPENED}",
}


def status_of(path: Path) -> os.stat_result:
    """Return the status of `path`. Raise PathError with the reason if there is none."""
    try:
        return path.stat()
    except FileNotFoundError:
        raise PathError(f"{path}: no such file or folder") from None
    except OSError as error:
        named = str(path) if len(str(path)) <= 300 else f"{str(path)[:297]}..."
        raise PathError(f"{named}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise PathError(f"{str(path)!r} is no name of a file: {error}") from None


def check_file(path: Path) -> None:
    """Raise PathError for anything but a regular file: a pipe would be waited for."""
    status = status_of(path)
    if stat.S_ISDIR(status.st_mode):
        raise PathError(f"{path}: is a folder, a file was expected")
    if not stat.S_ISREG(status.st_mode):
        raise PathError(f"{path}: is not a regular file")


def refuse_code(path: Path) -> bytes:
    """Return a file's first 16 bytes. Raise ConfigError for those of a format that is not read,
    PathError if it cannot be read."""
    check_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise PathError(f"{path}: cannot be read: {error.strerror}") from None
    for magic, what in _MAGIC.items():
        if start.startswith(magic):
            raise ConfigError(f"{path}: is {what}")
    # protocol 2 and later begin with 0x80 and their number
    if len(start) >= 2 and start[0] == 0x80 and 2 <= start[1] <= 5 and start[8:9] != b"{":
        raise ConfigError(f"{path}: is a pickle: it {_NOT_OPENED}")
    return start


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. `Infinity` and `NaN` are read: configurations of state-space
    models have them; as a size they are refused where the size is asked for. Raise PathError if it
    cannot be read, ConfigError if it is not JSON or has a key twice."""
    check_file(path)
    return bounded_json.read_named(path, "a description of a model")


def shown(value: Any) -> str:
    """Return a value for an error message: as Python writes it, but not long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def one_line(error: BaseException) -> str:
    """Return an error's type and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
