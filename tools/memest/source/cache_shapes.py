"""The key/value cache that transformers' modules fill, found by running them without values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.planning.plan.kv_plan import CacheShape
from offload.zero.kv.sizes import CachedLayer

if TYPE_CHECKING:
    from torch import Tensor, nn

_LENGTHS = (2, 3)  # of sequences that modules are asked with: shorter than any window


def modules_cache(model: nn.Module) -> CacheShape | None:
    """Return the cache that transformers' modules fill in their own forward, run without values.
    None if there is none, or if the forward needs values."""
    import torch

    from offload.planning.activations.valueless import WithoutValues, valueless

    values = WithoutValues()
    training = model.training
    model.eval()
    try:
        with valueless(model, values, torch.float32), values, torch.no_grad():
            found = [_kept(model, length) for length in _LENGTHS]
    except Exception:  # noqa: BLE001 - the model's own code, on what it may not be made for
        return None
    finally:
        model.train(training)
    few, more = found
    if not few or len(few) != len(more):
        return None
    pairs = zip(few, more, strict=True)
    return CacheShape(tuple(_layer(a, b) for a, b in pairs if b.numel))


class _Kept(NamedTuple):
    """The cache of one layer."""

    window: int | None
    numel: int
    keys: tuple[int, ...]  # shapes: batch, heads, tokens, width
    values: tuple[int, ...]


def _kept(model: nn.Module, length: int) -> list[_Kept]:
    import torch

    output = model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=True)
    cache = getattr(output, "past_key_values", None)
    return [
        _Kept(
            getattr(layer, "sliding_window", None),
            sum(t.numel() for t in _states(vars(layer))),
            *(tuple(getattr(getattr(layer, n, None), "shape", ())) for n in ("keys", "values")),
        )
        for layer in getattr(cache, "layers", ())
    ]


def _states(values: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(values, torch.Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        for each in values.values():
            yield from _states(each)
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _states(each)


def _layer(few: _Kept, more: _Kept) -> CachedLayer:
    token_numel = (more.numel - few.numel) // (_LENGTHS[1] - _LENGTHS[0])
    fixed_numel = few.numel - token_numel * _LENGTHS[0]
    heads = few.keys[1] if len(few.keys) == 4 else 1
    key_dim, value_dim = (shape[-1] if len(shape) == 4 else 0 for shape in (few.keys, few.values))
    if heads * (key_dim + value_dim) != token_numel:  # not keys and values alone, or none
        heads, key_dim, value_dim = 1, token_numel - token_numel // 2, token_numel // 2
    return CachedLayer(heads, key_dim, value_dim, few.window, fixed_numel)
