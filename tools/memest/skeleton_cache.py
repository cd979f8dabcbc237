"""Shapes of models that took seconds to build, kept on disk."""

from __future__ import annotations

from typing import Any

from offload.planning.machine.disk_cache import flag, load, text, whole
from offload.tools.memest.answer_cache import keep
from offload.zero.layout import ParamShape
from offload.zero.model_shape import GroupShape, ModelShape, UnitShape

_KIND = "shapes"


def load_shape(key: str) -> ModelShape | None:
    """The shape kept under `key`; None if there is none that can be read."""
    return load(_KIND, key, _decoded)


def save_shape(key: str, shape: ModelShape) -> None:
    """Keep a shape under `key`."""
    keep(_KIND, key, _encoded(shape))


def _encoded(shape: ModelShape) -> dict[str, Any]:
    return {
        "groups": [
            [group.name, [[param.names, param.shape, param.trainable] for param in group.params]]
            for group in shape.groups
        ],
        "units": [[unit.name, unit.groups, unit.repeated] for unit in shape.units],
    }


def _decoded(values: Any) -> ModelShape:
    groups = tuple(
        GroupShape(text(name), tuple(_param(*param) for param in params))
        for name, params in values["groups"]
    )
    units = tuple(
        UnitShape(text(name), tuple(whole(i, len(groups)) for i in indices), flag(repeated))
        for name, indices, repeated in values["units"]
    )
    return ModelShape(groups, units)


def _param(names: Any, shape: Any, trainable: Any) -> ParamShape:
    return ParamShape(
        tuple(text(name) for name in names), tuple(whole(n) for n in shape), flag(trainable)
    )
