"""Sends tokens to the ranks of their experts, and back.

    rank 0   to e0 e1 | e2 e3          rank 0   e0 of 0, e0 of 1, e1 of 0, e1 of 1
    rank 1   to e0 e1 | e2 e3    ─▶    rank 1   e2 of 0, e2 of 1, e3 of 0, e3 of 1

Ranks send as many tokens as there are (counts go ahead), none is padded. All ranks of a group take
part in each exchange, also with nothing to send, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """The exchange of one layer for one forward. `counts` has, for each expert of this rank, the
    rows that come from all ranks. Creating it waits for the other ranks."""

    def __init__(self, counts: Sequence[int], group: dist.ProcessGroup, device: torch.device):
        """`counts` has this rank's tokens for each of all experts."""
        ranks = group.size()
        sent = torch.tensor(counts, device=device).view(ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self._group = group
        self._sent: list[int] = sent.sum(1).tolist()
        self._pieces: list[list[int]] = received.tolist()  # by source, then by expert
        self.counts: list[int] = received.sum(0).tolist()

    def there(self, x: Tensor) -> Tensor:
        """Turn rows sorted by all experts into rows sorted by the experts of this rank."""
        received = [sum(row) for row in self._pieces]
        y = _all_to_all(x, self._sent, received, self._group)
        return _transposed(y, self._pieces)

    def back(self, y: Tensor) -> Tensor:
        """Reverse `there`, for the results computed from the rows."""
        by_expert = [list(column) for column in zip(*self._pieces, strict=True)]
        received = [sum(row) for row in self._pieces]
        return _all_to_all(_transposed(y, by_expert), received, self._sent, self._group)


def _transposed(x: Tensor, pieces: list[list[int]]) -> Tensor:
    """Transpose pieces of rows: x has them row by row of this table of their lengths, the result
    has them column by column."""
    parts = x.split([length for row in pieces for length in row])
    columns = len(pieces[0])
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


def _all_to_all(
    x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    # A rank whose own part needs no gradient takes part in backward, too: others wait for it.
    anchor = torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())
    result: Tensor = _AllToAll.apply(anchor, x, sent, received, group)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, sent: list[int], received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:  # fmt: skip
        ctx.way_back = received, sent, group
        y = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, _all_to_all(grads[0], *ctx.way_back), None, None, None
