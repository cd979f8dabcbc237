"""Files of `torch.save`, read by `torch.load(weights_only=True)`: tensors, plain values and
containers of them. What PyTorch promises of such a load is all that is promised here."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from offload.display.plain_text import plain
from offload.tiers.errors import CheckpointError


class Opaque:
    """An object of a class that is not imported: the `arguments` and the `state` in its pickle."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> Self:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_file(path: Path) -> Any:
    """Load a file whose tensors stay in it, mapped into memory; one that is no zip archive, as
    `torch.save` wrote them before PyTorch 1.6, is loaded whole. Objects of other classes than
    PyTorch's become `Opaque`.

    Raises CheckpointError for a file that is missing, damaged, or holds what `weights_only`
    refuses.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path} is no regular file; get the folder again")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; get the folder again") from None
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from None
    with refusals(str(path)):
        is_mapped = zipfile.is_zipfile(path)
        names = get_unsafe_globals_in_checkpoint(str(path)) if is_mapped else []
        with safe_globals([(Opaque, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)


@contextmanager
def refusals(
    what: str, problem: str = "cannot be read as tensors and plain values",
    remedy: str = "save it again with those alone, or load another checkpoint",
) -> Iterator[None]:  # fmt: skip
    """A context in which every error is a CheckpointError that names `what` and the remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a forged pickle raises anything
        raise CheckpointError(f"{what} {problem}: {_reason(error)}; {remedy}") from None


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and lines[0].startswith("Weights only load failed"):
        lines = lines[-2:]  # before that stands how to run what the file names
    return plain(lines[0], 200) if lines else type(error).__name__
