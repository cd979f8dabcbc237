"""transformers' caches, piece by piece of the batch (see `zero/micro_batches.py`).

A part of a cache is a cache of the same class, whose layers are made when the block asks for them
(each block asks for its own): rows of every tensor that has one per sample. What a block has put
there is joined to whole tensors again behind its last piece: between blocks a cache is what it is
without pieces, so beams, cropping and masks know nothing of them.

A layer that keeps its tokens elsewhere has a method `of_rows(rows, batch)`, which gives a layer of
these rows alone, and sees by itself to what is put there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, QuantizedLayer
from transformers.utils import output_capturing

from offload.tiers.errors import UnsupportedError
from offload.zero.recompute.micro_batches import Splitters

_LAYERS = "layers"
_COUNTS = frozenset({"batch_size"})  # numbers of samples


class CachePieces:
    """One cache in one call of a block."""

    def __init__(self, cache: Any, batch: int, *, copied: bool = False) -> None:
        """Raises UnsupportedError for a cache whose class is not transformers' own."""
        if type(cache).__module__ != cache_utils.__name__:
            _refuse(cache)
        self.whole = cache
        self._batch = batch
        self._copied = copied
        self._parts: list[Any] = []

    def part(self, rows: slice) -> Any:
        self._parts.append(_part_of(self.whole, rows, self._batch, copied=self._copied))
        return self._parts[-1]

    def join(self) -> None:
        _join(self.whole, self._parts, self._batch)

    def trial(self) -> CachePieces:
        return CachePieces(self.whole, self._batch, copied=True)


SPLITTERS: Splitters = {Cache: CachePieces}


def refuse_records(name: str) -> None:
    """Raise UnsupportedError if transformers records outputs of modules inside the block `name`: it
    would record each piece separately."""
    collector = getattr(output_capturing, "_active_collector", None)
    for key in () if collector is None else collector.get() or ():
        if key != "hidden_states" and not key.startswith("_"):  # those are the block's own
            raise UnsupportedError(
                f"{name}: micro_batches computes the pieces of a batch one after the other, and "
                f"{key} of all of them are asked for (output_{key}=True); leave that out, or set "
                "micro_batches: 1"
            )


def _part_of(cache: Any, rows: slice, batch: int, *, copied: bool) -> Any:
    part = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == _LAYERS:
            part.layers = _LayersOf(value, rows, batch, copied=copied)
        elif isinstance(value, Cache):  # of an encoder and a decoder
            setattr(part, name, _part_of(value, rows, batch, copied=copied))
        elif isinstance(value, dict):
            setattr(part, name, dict(value))
    return part


def _join(cache: Any, parts: Sequence[Any], batch: int) -> None:
    for name, value in vars(parts[-1]).items():
        if name == _LAYERS:
            _join_layers(cache.layers, [part.layers for part in parts], batch)
        elif isinstance(value, Cache):
            _join(getattr(cache, name), [getattr(part, name) for part in parts], batch)
        else:
            setattr(cache, name, value)


class _LayersOf(list[Any]):
    """Rows of the layers of a cache. Each layer is created when a block asks for it."""

    def __init__(self, wholes: Sequence[Any], rows: slice, batch: int, *, copied: bool) -> None:
        super().__init__(wholes)
        self.made: dict[int, _LayerOf] = {}
        self._rows, self._batch, self._copied = rows, batch, copied

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(len(self)))]
        number = range(len(self))[key]
        if number not in self.made:
            whole = super().__getitem__(number)
            self.made[number] = _LayerOf(whole, self._rows, self._batch, copied=self._copied)
        return self.made[number].layer

    def __iter__(self) -> Any:
        return (self[number] for number in range(len(self)))

    def added(self, start: int) -> list[Any]:
        """Return the layers that the block appended after the first `start`, unchanged."""
        return [super(_LayersOf, self).__getitem__(each) for each in range(start, len(self))]


class _LayerOf:
    """Rows of one layer."""

    def __init__(self, whole: Any, rows: slice, batch: int, *, copied: bool) -> None:
        self.count = rows.stop - rows.start
        self.joins_itself = hasattr(whole, "of_rows")
        self.given: dict[str, Any] = {}  # what need not be joined if it is still there
        if self.joins_itself:
            self.layer = (copy.deepcopy(whole) if copied else whole).of_rows(rows, batch)
            return
        if type(whole).__module__ != cache_utils.__name__ or isinstance(whole, QuantizedLayer):
            _refuse(whole)
        self.layer = copy.copy(whole)
        for name, value in vars(whole).items():
            own = self.count if name in _COUNTS else _rows_of(value, rows, batch)
            setattr(self.layer, name, copy.deepcopy(own) if copied else own)
            if not isinstance(own, dict) and (own is value or _is_by_sample(value, batch)):
                self.given[name] = own


def _is_by_sample(value: Any, batch: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == batch


def _rows_of(value: Any, rows: slice, batch: int) -> Any:
    if isinstance(value, dict):
        return {key: _rows_of(each, rows, batch) for key, each in value.items()}
    if _is_by_sample(value, batch):
        return value[rows]
    return (
        value.clone() if isinstance(value, torch.Tensor) else value
    )  # each piece counts by itself


def _join_layers(wholes: list[Any], parts: Sequence[_LayersOf], batch: int) -> None:
    wholes.extend(parts[0].added(len(wholes)))  # a dynamic cache grows by the layer
    for number in parts[0].made:
        made = [part.made[number] for part in parts]
        if made[0].joins_itself:
            continue
        for name in vars(made[0].layer):
            values = [getattr(each.layer, name) for each in made]
            if all(v is each.given.get(name, made) for v, each in zip(values, made, strict=True)):
                continue
            joined = batch if name in _COUNTS else _joined(values, made)
            setattr(wholes[number], name, joined)


def _joined(values: Sequence[Any], made: Sequence[_LayerOf]) -> Any:
    """Return the rows of all pieces, concatenated; any other value is the last piece's."""
    last = values[-1]
    if isinstance(last, dict):
        return {key: _joined([value[key] for value in values], made) for key in last}
    by_sample = (_is_by_sample(v, each.count) for v, each in zip(values, made, strict=True))
    return torch.cat(list(values)) if all(by_sample) else last


def _refuse(what: Any) -> None:
    raise UnsupportedError(
        f"micro_batches cannot split a {type(what).__name__}; use a DynamicCache or StaticCache of "
        "transformers (cache_implementation=), use_cache=False, or micro_batches: 1"
    )
