"""The experts of a layer that are on this rank, numbered among all experts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.tiers.errors import ConfigError


class Experts(nn.ModuleList):
    """Experts `first`, `first` + 1, ... of a layer, each named by its number on every rank.

    An expert is called with the tokens that chose it, [n, H], and not at all without any: its
    parameters then have no gradient. `on_chosen`, if set, is told the numbers of those that are
    called next, in the order of their calls, before the first of them is.
    """

    on_chosen: Callable[[Sequence[int]], None] | None = None

    def __init__(self, experts: Iterable[nn.Module], first: int, total: int) -> None:
        """`total` is the number of experts of all ranks."""
        super().__init__()
        for number, expert in enumerate(experts, first):
            self.add_module(str(number), expert)
        self.first = first
        self.total = total

    @property
    def ep_size(self) -> int:
        """The number of ranks over which the experts are spread, which
        `zero/groups/parameter_grouping.py` reads."""
        return self.total // len(self)

    def __getitem__(self, number: Any) -> Any:
        """Return the expert with this number among all; a slice is of this rank's experts."""
        return nn.ModuleList([*self][number]) if isinstance(number, slice) else self._of(number)

    def __setitem__(self, number: int, expert: nn.Module) -> None:
        """Replace the expert with this number among all experts."""
        self._of(number)
        self.add_module(str(number), expert)

    def _of(self, number: int) -> nn.Module:
        expert = self._modules.get(str(number))
        if expert is None:
            last = self.first + len(self) - 1
            raise IndexError(f"expert {number}: this rank has {self.first} to {last}")
        return expert

    def compute(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute `x` [N, H], sorted by expert, of which `counts` has the number of rows of each.
        Return NH in the format of `x`, also under autocast: other ranks, which may have no rows,
        receive it."""
        numbers = [number for number, count in enumerate(counts, self.first) if count]
        if self.on_chosen is not None:
            self.on_chosen(numbers)
        parts = x.split(list(counts))
        outputs = [self._call(number, parts[number - self.first]) for number in numbers]
        # `x` without rows: what comes out depends on `x` also where no expert is called
        return torch.cat([x[:0], *outputs])

    def _call(self, number: int, x: Tensor) -> Tensor:
        output = self._of(number)(x)
        # of those that return their bias or a loss beside it; DeepSpeed drops these, too
        y = output[0] if isinstance(output, tuple) else output
        if not isinstance(y, Tensor) or y.shape != x.shape:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ConfigError(
                f"MoE: expert {number} makes {shape} of tokens of shape {tuple(x.shape)}; the "
                "output of an expert has the shape of its input"
            )
        return y.to(x.dtype)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Leave out the experts of other ranks: a file of a layer may hold all of them."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        others = {str(number) for number in range(self.total)} - self._modules.keys()
        unexpected_keys[:] = [
            key for key in unexpected_keys
            if not (key.startswith(prefix) and key[len(prefix):].split(".", 1)[0] in others)
        ]  # fmt: skip
