"""Selective recomputation: results of expensive operations are kept, others computed again.

The idea and the choice of operations (matrix products, convolutions, attention) are those of
`torch.utils.checkpoint.create_selective_checkpoint_contexts`. Unlike there, kept results go to the
keeper of activations, a result that is changed in place afterwards is computed again instead of
being an error, and a graph may be run backward several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

from offload.tiers.errors import StateError
from offload.zero.hooks.handles import Keeper, SavedTensor

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")


class _Alias:
    """A kept tensor while its block still runs: shares values and the version, but no graph, so
    that a node's output does not keep the node."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = _detached(tensor)
        self._version = tensor._version

    @property
    def changed(self) -> bool:
        return self.tensor._version != self._version


class SelectiveCheckpoint:
    """One block's products, in the order they were computed."""

    def __init__(self, keeper: Keeper | None) -> None:
        self._keeper = keeper
        # per call its operation and outputs; None: to be computed again
        self.calls: list[tuple[Any, Any | None]] = []

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Keep products of the block's forward, which runs inside."""
        with _Watch(self._keep):
            yield
        self.calls = [(op, self._settled(outputs)) for op, outputs in self.calls]

    def _keep(self, op: Any, run: Callable[[], Any]) -> Any:
        outputs = run()
        self.calls.append((op, pytree.tree_map_only(torch.Tensor, _Alias, outputs)))
        return outputs

    def _settled(self, outputs: Any) -> Any | None:
        aliases = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, _Alias)]
        if any(alias.changed for alias in aliases):
            return None
        return pytree.tree_map_only(_Alias, self._saved, outputs)

    def _saved(self, alias: _Alias) -> SavedTensor:
        """Return a kept tensor once its block has run. Unlike autograd's it may be changed."""
        parked = None if self._keeper is None else self._keeper.keep(alias.tensor)
        return SavedTensor(alias.tensor, parked)

    @contextmanager
    def calls_again(self) -> Iterator[None]:
        """Use the kept products in the block's forward, computed again inside."""
        left = iter(self.calls)

        def replay(op: Any, run: Callable[[], Any]) -> Any:
            known, outputs = next(left, (None, None))
            if known is not op:
                raise StateError(
                    f"placement.activations.checkpoint: selective: a block computed {op} where it "
                    f"computed {known} in forward; its forward must do the same each time, or set "
                    "checkpoint: false"
                )
            return run() if _is_lost(outputs) else _restored(outputs)

        with _Watch(replay):
            yield


class _Watch(TorchDispatchMode):
    """Passes calls of expensive operations to `take`, with a function that runs them."""

    def __init__(self, take: Callable[[Any, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._take = take

    def __exit__(self, *error: Any) -> None:
        """Leave, even if it was taken off already and others are on the stack."""
        if self in _get_current_dispatch_mode_stack():
            super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_dear(func, args, kwargs):
            return func(*args, **kwargs)
        return self._take(func, lambda: func(*args, **kwargs))


class watches_taken_off:  # noqa: N801 - as other contexts, and not a generator
    """A context that removes watches left on torch's stack: an interrupt may come just before a
    watch takes itself off."""

    def __enter__(self) -> None:
        self._outer = torch._C._len_torch_dispatch_stack()

    def __exit__(self, *_: object) -> None:
        while torch._C._len_torch_dispatch_stack() > self._outer:
            _pop_mode()


def _is_dear(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether to keep the results. Those of random operations are not kept: if attention is
    not computed again it draws no random numbers, and the dropout after it would draw them."""
    schema: Any = getattr(op, "_schema", None)
    if schema is None:  # an operation of higher order
        return False
    name = schema.name.rpartition("::")[2]
    if name in _PRODUCTS:
        return not schema.is_mutable
    return bool(name.startswith(_ATTENTION)) and not _drops_out(schema, args, kwargs)


def _drops_out(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return False


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # below autograd `detach` would count versions on its own
    exclude = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
    with exclude:
        return tensor.detach()


def _is_lost(outputs: Any | None) -> bool:
    """Return whether outputs of a call were changed in place: in its block (None) or outside."""
    leaves = pytree.tree_leaves(outputs)
    return outputs is None or any(leaf.changed for leaf in leaves if isinstance(leaf, SavedTensor))


def _restored(outputs: Any) -> Any:
    """Return new tensors each time: autograd writes its graph into what an operation returns."""
    return pytree.tree_map_only(SavedTensor, lambda saved: _detached(saved.tensor()), outputs)
