"""Pruning of a weight by magnitude, as DeepSpeed's compression library offers it ("sparse_pruning",
l1 and n:m), of stored tensors."""

from __future__ import annotations

import re

from torch import Tensor

from offload.quantised.matrix import piece_rows
from offload.tiers.errors import ConfigError

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")


class Pruning:
    """`2:4`: of four consecutive elements of a row the two smallest become zero. `30%`: so many of
    a weight's elements do, the smallest. Of equal magnitudes the first one goes."""

    def __init__(self, text: str) -> None:
        """ConfigError for other texts."""
        share = _SHARE.fullmatch(text)
        self._share = None if share is None else float(share[1]) / 100
        if text != "2:4" and not (self._share is not None and 0 < self._share < 1):
            raise ConfigError(f"prune: expected 2:4, or a share as 30%, got {text!r:.40}")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """ConfigError for a weight whose rows (of inputs) are no whole groups of four."""
        if self._share is None and shape[-1] % 4:
            raise ConfigError(
                f"{name} has rows of {shape[-1]}, which 2:4 does not divide; skip it, or prune a "
                "share of its elements (30%)"
            )

    def apply(self, weight: Tensor) -> None:
        """In place; [rows, columns]."""
        if self._share is None:
            for rows in weight.split(piece_rows(weight.shape[1])):
                fours = rows.unflatten(-1, (-1, 4))
                order = fours.abs().argsort(dim=-1, stable=True)
                rows.copy_(fours.scatter(-1, order[..., :2], 0.0).flatten(-2))
            return
        count = int(weight.numel() * self._share)
        if not count:
            return
        flat = weight.abs().flatten()
        most = flat.kthvalue(count).values
        equal = (flat == most).nonzero().flatten()
        gone = flat < most
        gone[equal[: count - int(gone.sum())]] = True
        weight.masked_fill_(gone.view(weight.shape), 0.0)
