"""The tensors that together form a weight, as they are in a folder's files."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.tiers.errors import CheckpointError
from offload.weights.tensor_file import Stored

_log = logging.getLogger("offload")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn,)
_GET = "get the folder again"


class Parts:
    """The tensors of a folder; a format takes out those that it understands.

    `left` has the others, by name.
    """

    def __init__(self, stored: dict[str, Stored]) -> None:
        self.left = stored

    def modules(self, ending: str) -> list[str]:
        """Return the names of modules that have a tensor of this name."""
        return [name.removesuffix(ending) for name in self.left if name.endswith(ending)]

    def take(
        self, name: str, dtypes: Iterable[torch.dtype], shape: tuple[int | None, ...], of: str
    ) -> Stored:
        """Take out a tensor of the weight `of`. Raise CheckpointError unless it is there, of one of
        `dtypes` and of `shape`, in which None is any size but 0."""
        part = self.left.pop(name, None)
        if part is None:
            raise CheckpointError(f"{of} is quantized, and its {name} is not there; {_GET}")
        if part.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise damaged(part, f"is {part.dtype}, and {wanted} was expected")
        fits = len(part.shape) == len(shape) and all(
            size == wanted or (wanted is None and size > 0)
            for size, wanted in zip(part.shape, shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise damaged(part, f"has shape {part.shape}, and ({sizes}) was expected")
        return part

    def scales(
        self, name: str, shape: tuple[int, ...], block: tuple[int, int], of: str,
        dtypes: Iterable[torch.dtype] = FLOATS,
    ) -> Stored:  # fmt: skip
        """Take out the scales of the blocks of a weight (or of several, in the first dimension). A
        scale of all of it may have any number of dimensions."""
        *several, rows, columns = shape
        wanted = (*several, -(-rows // block[0]), -(-columns // block[1]))
        if math.prod(wanted) == 1 and name in self.left:
            wanted = (1,) * len(self.left[name].shape)
        return self.take(name, dtypes, wanted, of)

    def drop(self, *endings: str) -> bool:
        """Leave out tensors by the ends of their names; return whether there were any."""
        dropped = [name for name in self.left if name.endswith(endings)]
        for name in dropped:
            del self.left[name]
        return bool(dropped)

    def groups_of_columns(
        self, name: str, columns: int, groups: int, of: str
    ) -> torch.Tensor | None:
        """Take out the group of each column; return None if no tensor says it: they are
        consecutive. Raise CheckpointError for a group that does not exist."""
        if name not in self.left:
            return None
        part = self.take(name, (torch.int32, torch.int64), (columns,), of)
        index = part.read().long()
        if bool(index.eq(-1).all()):
            return None
        lowest, highest = int(index.min()), int(index.max())
        if lowest < 0 or highest >= groups:
            raise damaged(part, f"names groups {lowest} to {highest}, and there are {groups}")
        return index

    def weight_name(self, module: str) -> str:
        """Return the name of a module's weight. Raise CheckpointError if the module has it
        unquantized as well."""
        name = f"{module}.weight"
        if name in self.left:
            raise CheckpointError(f"{module} has a weight and a quantized one; {_GET}")
        return name


def damaged(part: Stored, why: str) -> CheckpointError:
    return CheckpointError(
        f"{part.name} {why}: {part.path.name} and quantization_config in config.json are of "
        f"different models, or damaged; {_GET}"
    )


def warn_of_activations() -> None:
    """Say that what multiplies the weights is not rounded as their library would round it."""
    _log.warning(
        "config.json says that activations are quantized, too, which is not done here: results "
        "are those of the dequantized weights"
    )


def pair_of(value: Any, key: str) -> tuple[int, int]:
    """Return the sizes of a block, as a list or `128x128`. Raise CheckpointError for others."""
    if isinstance(value, str):
        value = [int(each) if each.isdecimal() else each for each in value[:40].split("x")]
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(type(each) is not int or not 0 < each < 1 << 32 for each in value):
        raise CheckpointError(
            f"quantization_config in config.json has {key}: {value!s:.40}, which is no pair of "
            f"sizes; {_GET}"
        )
    return value[0], value[1]


def number(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer of a configuration. Raise CheckpointError for any other value."""
    value = settings.get(key, default)
    if type(value) is not int:
        raise CheckpointError(
            f"quantization_config in config.json has {key}: {value!r:.40}, which is no whole "
            f"number; {_GET}"
        )
    return value


def groups_in(columns: int, group_size: int, name: str) -> int:
    """Return the number of groups of a row; a size of -1 is the whole row. Raise CheckpointError
    unless the groups fill it."""
    size = columns if group_size == -1 else group_size
    if size <= 0 or columns % size:
        raise CheckpointError(
            f"{name} has rows of {columns}, which groups of {group_size} do not divide: its file "
            f"and quantization_config in config.json do not belong together; {_GET}"
        )
    return columns // size


def names(settings: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of strings of a configuration, or the keys of an object; empty if it is absent.
    Raise CheckpointError for any other value."""
    value = settings.get(key) or ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise CheckpointError(
            f"quantization_config in config.json has {key}: {value!r:.40}, which is no list; {_GET}"
        )
    return [str(each) for each in value]
