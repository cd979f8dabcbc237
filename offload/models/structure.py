"""Whether a model still has the parameters that it had in `offload.initialize`.

A head, an adapter or a larger embedding put in later has parameters that no update sees: autograd
gives them gradients, and they stay as they are. That is looked for before every step, by identity.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

from torch import nn

from offload.tiers.errors import UnsupportedError

_MOST_NAMES = 4  # in an error


class ModelStructure:
    """A model's parameters as they were. Those that are not managed (complex ones, frozen ones that
    were added) have to stay frozen."""

    def __init__(self, model: nn.Module, home_of: Callable[[nn.Parameter], object]) -> None:
        """`home_of` returns None for a parameter that is not managed."""
        self._model = model
        self._home_of = home_of
        self._note()

    def check(self) -> None:
        """Raise UnsupportedError, naming trainable parameters that no update would see."""
        now = list(self._model.parameters())
        if len(now) != len(self._named) or not all(map(is_, now, self._named.values())):
            self._note()
        trained = [name for name, param in self._others.items() if param.requires_grad]
        if trained:
            raise UnsupportedError(
                f"{_listed(trained)}: no update would see what was put into the model after "
                "offload.initialize (or is no real floating point); add modules, adapters and "
                "tokens before offload.initialize, write values into the parameters that are there "
                "(engine.gathered), or freeze what is new with requires_grad_(False)"
            )

    def _note(self) -> None:
        self._named = dict(self._model.named_parameters())
        self._others = {n: p for n, p in self._named.items() if self._home_of(p) is None}


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
