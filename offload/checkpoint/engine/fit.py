"""The check whether a checkpoint belongs to an engine, made before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from offload.checkpoint.engine import model
from offload.checkpoint.format.manifest import Manifest, OptimizerRecord, ParameterRecord
from offload.tiers.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from offload.models.trained import Trained

_WEIGHTS = (
    "to start from its weights alone: `offload checkpoint export` and "
    "offload.initialize(..., weights=)"
)


def match(engine: Trained, manifest: Manifest, path: Path) -> dict[str, ParameterRecord]:
    """A checkpoint's record for each of the engine's parameters, by the engine's first name.

    CheckpointError, saying what differs, unless the engine can take the checkpoint over.
    """
    _check_numbers_format(engine, manifest, path)
    parameters = _match_parameters(model.parameter_records(engine), manifest.parameters, path)
    aliases = {record.names[0]: name for name, record in parameters.items()}
    _check_param_groups(model.optimizer_record(engine), manifest.optimizer, aliases, path)
    _check_numbers(engine, manifest, path)
    return parameters


def _check_numbers_format(engine: Trained, manifest: Manifest, path: Path) -> None:
    mine, saved = model.optimizer_record(engine), manifest.optimizer
    pairs = [
        ("precision", engine.config.precision, manifest.precision),
        # rounding differs between the two, so a conversion could change weights by a bit
        ("optimizer.master", mine.master, saved.master),
        ("optimizer.type", mine.type, saved.type),
    ]
    for key, here, there in pairs:
        if here != there:
            raise CheckpointError(
                f"{path} was saved with {key}: {there}, this engine has {key}: {here}; set "
                f"{key}: {there} to go on training, or {_WEIGHTS}"
            )
    if mine.fields != saved.fields:
        raise CheckpointError(
            f"{path} has the optimizer states {_fields(saved)}, this engine keeps {_fields(mine)}; "
            f"set optimizer.states and amsgrad as when it was saved, or {_WEIGHTS}"
        )
    if (manifest.loss_scale is None) != (engine.runtime.loss_scale is None):
        has = "no loss scale" if manifest.loss_scale is None else "a loss scale"
        raise CheckpointError(f"{path} has {has}, unlike any with precision: {manifest.precision}")


def _fields(record: OptimizerRecord) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in record.fields.items()) or "(none)"


def _match_parameters(
    mine: Sequence[ParameterRecord], saved: Sequence[ParameterRecord], path: Path
) -> dict[str, ParameterRecord]:
    by_name = {name: record for record in saved for name in record.names}
    known = {name for record in mine for name in record.names}
    found = {}
    for here in mine:
        there = next((by_name[name] for name in here.names if name in by_name), None)
        if there is None:
            _refuse(path, f"{here.names[0]} is not in it")
        for what, of in _ALIKE.items():
            if of(here) != of(there):
                _refuse(path, f"{here.names[0]} has {what} {of(there)}, here {of(here)}")
        found[here.names[0]] = there
    for record in saved:
        if not any(name in known for name in record.names):
            _refuse(path, f"{record.names[0]} is not in the model")
    return found


_ALIKE: dict[str, Callable[[ParameterRecord], object]] = {
    "shape": lambda record: tuple(record.shape),
    "dtype": lambda record: record.dtype,
    "tie": lambda record: " = ".join(sorted(record.names)),
    "requires_grad": lambda record: record.trainable,
}


def _check_param_groups(
    mine: OptimizerRecord, saved: OptimizerRecord, aliases: Mapping[str, str], path: Path
) -> None:
    """`aliases`: the engine's first name of a parameter by the checkpoint's."""
    groups = [
        [frozenset(group.params) for group in mine.param_groups],
        [frozenset(map(aliases.get, group.params)) for group in saved.param_groups],
    ]
    if groups[0] != groups[1]:
        raise CheckpointError(
            f"{path} has other param groups than this optimizer, or other parameters in one of "
            "them; pass `parameters=` to offload.initialize as when it was saved"
        )


def _check_numbers(engine: Trained, manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError unless the param groups could be trained with their new numbers."""
    optimizer = engine.optimizer
    pairs = zip(optimizer.param_groups, manifest.optimizer.param_groups, strict=True)
    for number, (group, record) in enumerate(pairs):
        try:
            optimizer.check_numbers(group, record.numbers)
        except (ValueError, UnsupportedError) as error:
            raise CheckpointError(
                f"{path} has a param group {number} that this optimizer cannot take over: {error}; "
                f"load another checkpoint, or {_WEIGHTS}"
            ) from None


def _refuse(path: Path, difference: str) -> NoReturn:
    raise CheckpointError(
        f"{path} is of another model: {difference}; build the model as it was saved"
    )
