"""Merging the state of a run that each rank keeps into the state that the first rank saves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import torch
import xxhash
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from offload.checkpoint.format.manifest import RunRecord
from offload.checkpoint.format.user_state import tensor_records
from offload.tiers.errors import StateError
from offload.zero.ranks.ranks import Ranks

_ASIDE = ("tensor", "array")  # of these kinds are values that refer to a tensor


def check_names(ranks: Ranks, names: Iterable[str]) -> None:
    """Raise StateError, on all ranks, unless all have registered the same names."""
    mine = crc32("\n".join(sorted(names)).encode()) >> 1
    if len({*ranks.exchange([mine], "what is registered")[:, 0].tolist()}) > 1:
        raise StateError(
            f"ranks have registered different names for checkpoints (here: "
            f"{', '.join(names) or 'none'}); register the same on all of them"
        )


def on_first(
    ranks: Ranks, values: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """The values and tensors of every rank, on the first rank; an empty list on the others."""
    raw = save_bytes(tensors, {"values": json.dumps(values)})
    sizes = ranks.exchange([len(raw)], "the states of a run")[:, 0].tolist()
    if ranks.rank:
        ranks.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0)
        return []
    found = [(values, tensors)]
    for source, size in enumerate(sizes[1:], start=1):
        came = ranks.receive(size, torch.uint8, source).numpy().tobytes()
        header = json.loads(came[8 : 8 + int.from_bytes(came[:8], "little")])
        found.append((json.loads(header["__metadata__"]["values"]), load_bytes(came)))
    return found


def merged(
    found: list[tuple[dict[str, Any], dict[str, torch.Tensor]]],
) -> tuple[RunRecord, dict[str, torch.Tensor]]:
    """The states of random numbers and objects are every rank's own; the rest is the first's."""
    first = found[0][0]
    objects = {}
    for name in first["objects"]:
        each = [values["objects"].get(name) for values, _ in found]
        objects[name] = each[:1] if len(each) > 1 and _are_alike(each, found) else each
    sections = {**first, "random": [values["random"] for values, _ in found], "objects": objects}
    of_first = [first[name] for name in ("extra", "entries", "versions", "state")]
    used = _names_in([sections["random"], objects, *of_first])
    tensors = {name: t for _, own in found for name, t in own.items() if name in used}
    return RunRecord(sections=sections, tensors=tensor_records(tensors)), tensors


def _are_alike(
    each: list[Any], found: list[tuple[dict[str, Any], dict[str, torch.Tensor]]]
) -> bool:
    return len({_text_of(one, own) for one, (_, own) in zip(each, found, strict=True)}) == 1


def _text_of(value: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """A text that is equal for equal values, whichever rank has them."""

    def spelled(value: Any) -> Any:
        if isinstance(value, list):
            return [spelled(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if value.get("is") not in _ASIDE:
            return {key: spelled(inner) for key, inner in value.items()}
        tensor = tensors[value["name"]]
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        return [value["is"], str(tensor.dtype), [*tensor.shape], xxhash.xxh3_128_hexdigest(raw)]

    return json.dumps(spelled(value))


def _names_in(value: Any) -> set[str]:
    """The names of the tensors that values refer to."""
    if isinstance(value, dict):
        own = {value["name"]} if value.get("is") in _ASIDE else set()
        return own.union(*map(_names_in, value.values()))
    return set().union(*map(_names_in, value)) if isinstance(value, list) else set()
