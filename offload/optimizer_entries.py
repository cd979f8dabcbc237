"""`engine.optimizer.state`: entries of users, and starting over by emptying it.

The states themselves are in the tiers, where `state_dict` and `load_state_dict` read and write
them. Starting over, as loops do by `optimizer.state = defaultdict(dict)`, `.clear()` or
`del optimizer.state[p]`, is done there too; looking for a state here is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from offload.tiers.errors import UnsupportedError


class _Entry(dict[str, Any]):
    """Of one parameter. Names of states that are in the tiers are among its keys."""

    def __init__(self, names: Callable[[], tuple[str, ...]]) -> None:
        super().__init__()
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._names(), *super().__iter__())))

    def __missing__(self, key: str) -> NoReturn:
        raise UnsupportedError(
            f"optimizer.state[parameter][{key!r}]: the optimizer's states live in the engine's "
            "tiers; optimizer.state_dict()['state'] has copies, and optimizer.load_state_dict "
            "takes them back"
        )


class OptimizerEntries(dict[Any, Any]):
    """Empty until users put something in. `start_over(param)` makes its states those of before
    the first update, `params()` are all, `names(param)` those of the states that `state_dict` has
    of it."""

    def __init__(
        self, start_over: Callable[[Any], None], params: Callable[[], list[Any]],
        names: Callable[[Any], tuple[str, ...]],
    ) -> None:  # fmt: skip
        super().__init__()
        self._start_over = start_over
        self._params = params
        self._names = names

    def __bool__(self) -> bool:
        """As of torch's optimizers: whether there are states. Where there are none,
        torch.distributed.checkpoint takes a step with zeros as gradients to make them."""
        return any(map(len, self.values())) or any(map(self._names, self._params()))

    def __missing__(self, param: Any) -> dict[str, Any]:
        self[param] = _Entry(lambda: self._names(param))
        return self[param]  # type: ignore[no-any-return]

    def __delitem__(self, param: Any) -> None:
        self.pop(param)

    def pop(self, param: Any, *default: Any) -> Any:
        self._start_over(param)
        return super().pop(param, *default or ({},))

    def clear(self) -> None:
        for param in self._params():
            self._start_over(param)
        super().clear()
