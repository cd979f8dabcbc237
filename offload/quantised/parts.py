"""The tensors that together make a weight, as a folder's files have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.tensor_file import Stored
from offload.tiers.errors import CheckpointError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_GET = "get the folder again"


class Parts:
    """The tensors of a folder; a format takes out those that it understands.

    `left` has the others, by name.
    """

    def __init__(self, stored: dict[str, Stored]) -> None:
        self.left = stored

    def modules(self, ending: str) -> list[str]:
        """Names of modules that have a tensor of this name."""
        return [name.removesuffix(ending) for name in self.left if name.endswith(ending)]

    def take(
        self, name: str, dtypes: Iterable[torch.dtype], shape: tuple[int | None, ...], of: str
    ) -> Stored:
        """A tensor of the weight `of`. CheckpointError unless it is there, of one of `dtypes` and
        of `shape`, in which None is any size but 0."""
        found = self.left.pop(name, None)
        if found is None:
            raise CheckpointError(f"{of} is quantised, and its {name} is not there; {_GET}")
        if found.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise damaged(found, f"is {found.dtype}, and {wanted} was expected")
        fits = len(found.shape) == len(shape) and all(
            size == wanted or (wanted is None and size > 0)
            for size, wanted in zip(found.shape, shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise damaged(found, f"has shape {found.shape}, and ({sizes}) was expected")
        return found

    def take_if(
        self, name: str, dtypes: Iterable[torch.dtype], shape: tuple[int | None, ...], of: str
    ) -> Stored | None:
        """The same, None where it is not there."""
        return self.take(name, dtypes, shape, of) if name in self.left else None

    def weight_name(self, module: str) -> str:
        """CheckpointError where the module has its weight unquantised as well."""
        name = f"{module}.weight"
        if name in self.left:
            raise CheckpointError(f"{module} has a weight and codes of it; {_GET}")
        return name


def damaged(part: Stored, why: str) -> CheckpointError:
    return CheckpointError(
        f"{part.name} {why}: {part.file.path.name} and quantization_config in config.json are of "
        f"different models, or damaged; {_GET}"
    )


def number(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of a configuration. CheckpointError for all else."""
    found = settings.get(key, default)
    if type(found) is not int:
        raise CheckpointError(
            f"quantization_config in config.json has {key}: {found!r:.40}, which is no whole "
            f"number; {_GET}"
        )
    return found


def groups_in(columns: int, group_size: int, name: str) -> int:
    """Groups of a row; a size of -1 is the whole row. CheckpointError unless they fill it."""
    size = columns if group_size == -1 else group_size
    if size <= 0 or columns % size:
        raise CheckpointError(
            f"{name} has rows of {columns}, which groups of {group_size} do not divide: its file "
            f"and quantization_config in config.json do not belong together; {_GET}"
        )
    return columns // size


def group_of(part: Stored, groups: int) -> torch.Tensor:
    """The group of each column, which a tensor says. CheckpointError unless all are there."""
    found = part.read().long()
    if found.numel() and not (int(found.min()) >= 0 and int(found.max()) < groups):
        raise damaged(
            part, f"names groups {int(found.min())} to {int(found.max())}, and there are {groups}"
        )
    return found


def names(settings: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts of a configuration, or the keys of an object; empty where there is none.
    CheckpointError for all else."""
    found = settings.get(key) or ()
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise CheckpointError(
            f"quantization_config in config.json has {key}: {found!r:.40}, which is no list; {_GET}"
        )
    return [str(each) for each in found]
