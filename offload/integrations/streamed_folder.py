"""A checkpoint of another framework as a folder: the engine's states, and the framework's own.

    epoch=3.ckpt/
        state.ckpt          what the framework saves, without weights and optimizer states
        states-1f2e3d4c/    a checkpoint of the engine, which state.ckpt names

Whenever the process dies, the folder holds the old checkpoint or the new one, whole: `state.ckpt`,
renamed last, says which.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from offload.checkpoint.engine.module_state import ModuleState
from offload.checkpoint.foreign.model_files import own_file
from offload.checkpoint.format.disk import (
    entries,
    is_folder,
    is_there,
    make_call,
    make_folder,
    new_file,
    remove_file,
    rename,
    storage_errors,
    sync_file,
    sync_folder,
)
from offload.checkpoint.format.folder import discard
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.safetensors_file import StoredTensor
from offload.config.paths import path_of
from offload.memory.leftovers import STATE
from offload.swap.io.maker_marks import marked
from offload.tiers.errors import (
    CheckpointError,
    OffloadError,
    PathError,
    StorageError,
)
from offload.zero.groups.bits import DTYPES

if TYPE_CHECKING:
    from offload.engine import Engine

_STATES = "offload_states"
_STATES_NAME = re.compile("states-[0-9a-f]{8}")


def is_streamed(path: Any) -> bool:
    """Whether it is a folder that `save` wrote."""
    state = path_of(path, "path") / STATE
    return make_call("stat", state, os.path.isfile, state)


def save(
    engine: Engine, path: Any, state: dict[str, Any], agree: Callable[[str], str], *, writes: bool
) -> None:
    """Save the engine's states, and `state` by `torch.save`. With several ranks, all have to call
    it; the one that `writes` writes, and `agree` sends its text to all.

    Raise PathError if `path` is not a folder here, or has other contents; and errors of
    `engine.save_checkpoint`.
    """
    if "://" in str(path):
        raise PathError(
            f"{path}: an engine's states are streamed into a local folder; name one, and copy it"
        )
    folder = path_of(path, "path")
    with storage_errors("creating", folder):
        if is_there(folder) and not is_streamed(folder) and not _is_empty(folder):
            raise PathError(f"{folder} holds something else than a checkpoint; name another path")
        make_folder(folder, parents=True)
    states = f"states-{secrets.token_hex(4)}"
    pending: _PendingState | None = None
    failure: StorageError | None = None
    if writes:
        try:
            pending = _PendingState(folder, states)
        except StorageError as error:
            failure = error
    states = agree("" if failure is not None else states)
    if failure is not None:
        raise failure
    if not states:
        raise CheckpointError(f"{folder} was not saved: the rank that writes could not begin")
    # schedulers are the framework's to save, in `state`
    beside: dict[str, Any] | None = {} if state else None
    if pending is None:
        engine.save_checkpoint(folder / states, state=beside)
        return
    with pending:
        engine.save_checkpoint(folder / states, state=beside)
        pending.write({**state, _STATES: states})
    for other in _all_states(folder):
        if other.name != states:
            discard(other)


class _PendingState:
    """A `STATE` file without its final name. It is written before the states that it refers to,
    whose name is in its own: `offload doctor` finds both if this process dies. A context
    manager."""

    def __init__(self, folder: Path, states: str) -> None:
        """Create the file. Raise StorageError."""
        self._folder, self._states = folder, folder / states
        self._path = folder / marked(f".{STATE}.{states}")
        new_file(self._path).close()

    def write(self, state: dict[str, Any]) -> None:
        """Write the state, and move the file to its final name, durably."""
        with storage_errors("writing", self._path), self._path.open("wb") as file:
            torch.save(state, file)
        sync_file(self._path)
        with storage_errors("writing", self._folder):
            rename(self._path, self._folder / STATE)
            sync_folder(self._folder)

    def __enter__(self) -> _PendingState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is None:
            return
        with suppress(OSError, OffloadError):  # the first error counts
            if is_there(self._path):  # else it has its name
                discard(self._states)
                remove_file(self._path)


def _all_states(folder: Path) -> list[Path]:
    with storage_errors("looking at", folder):
        names = [entry.name for entry in entries(folder)]
    return [folder / name for name in names if _STATES_NAME.fullmatch(name)]


def _is_empty(folder: Path) -> bool:
    """Whether the folder is empty, apart from files that a killed save left behind."""
    return is_folder(folder) and all(
        each.name.startswith(("states-", f".{STATE}")) for each in entries(folder)
    )


def read(path: Any, load: Callable[[Path], dict[str, Any]]) -> tuple[dict[str, Any], Path]:
    """Return the framework's state, read by `load`, and the folder of the engine's states."""
    folder = path_of(path, "path")
    state = load(own_file(folder, STATE))
    name = str(state.pop(_STATES, "nothing"))
    states = folder / name
    if not _STATES_NAME.fullmatch(name) or not states.is_dir():
        raise CheckpointError(f"{states} is missing, which {folder / STATE} names; load another")
    return state, own_file(folder, name)


def load_state(path: Path, *, trust: bool) -> dict[str, Any]:
    """Read a `state.ckpt`, a file of `torch.save`. Raise CheckpointError if it holds more than
    tensors and plain values, unless `trust` is set: code that the file names creates anything
    else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=not trust)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001 - whatever unpickling makes of damaged bytes
        if trust or not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(f"{path} is damaged ({error!r:.200}); load another") from None
        raise CheckpointError(
            f"{path} is a pickle that cannot be read as data alone ({_first_line(error)}), and to "
            "read it otherwise runs code that it names; if you trust whoever wrote it, pass "
            "trust=True"
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, no state; load another")
    return found


def _first_line(error: Exception) -> str:
    """Return the line of torch's message with the reason; others say how to disable the check."""
    lines = [
        line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "class" in line
    ]
    return (lines or str(error).splitlines() or ["no reason given"])[0][:200]


def remove(path: Any) -> None:
    """Remove a folder that `save` wrote. The remains of a killed removal are no checkpoint."""
    folder = path_of(path, "path")
    (folder / STATE).unlink()
    for states in _all_states(folder):
        discard(states)
    shutil.rmtree(folder)


def load_weights(engine: Engine, states: Path) -> None:
    """Load parameters and persistent buffers alone, for any optimizer.

    Raise CheckpointError unless `states` has them all, in the model's shapes, and no others.
    """
    own = dict(engine.module.named_parameters(remove_duplicate=False))
    others = ModuleState.of(engine).tensors
    with CheckpointReader(states) as reader:
        reader.check(contents=True)
        saved = {name: stored for names, stored in reader.weights() for name in names}
        _check_fit(states, saved, own | others)
        with torch.no_grad():
            for name, param in engine.module.named_parameters():
                if name not in others:
                    for number, row in enumerate(engine.runtime.store.rows_of(param)):
                        with engine.gathered(row):
                            row.copy_(_value(reader, saved[name], row.shape, number))
            for name, tensor in others.items():
                tensor.copy_(_value(reader, saved[name], tensor.shape))


def _check_fit(
    states: Path, saved: Mapping[str, StoredTensor], own: Mapping[str, torch.Tensor]
) -> None:
    absent = sorted(saved.keys() - own.keys())
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise CheckpointError(
            f"{states} has {', '.join(absent[:3])}{more}, which the model does not have; it is "
            "of another model"
        )
    for name, tensor in own.items():
        found = saved.get(name)
        if found is None or found.info.shape != tuple(tensor.shape):
            has = "not there" if found is None else f"of shape {found.info.shape}"
            raise CheckpointError(
                f"{states}: {name} {tuple(tensor.shape)} is {has}; it is of another model"
            )


def _value(
    reader: CheckpointReader, stored: StoredTensor, shape: Sequence[int], number: int = 0
) -> torch.Tensor:
    """A tensor, or one of its rows (the `number`th), of which each has this shape."""
    value = torch.empty(shape, dtype=DTYPES[stored.info.dtype])
    if value.numel():
        raw = value.reshape(-1).view(torch.uint8).numpy().data
        reader.read_into(stored, number * value.nbytes, raw)
    return value


def weights_of(states: Path) -> dict[str, torch.Tensor]:
    """Return a state dict of parameters and persistent buffers in RAM, by all their names, compared
    with their hashes."""
    found: dict[str, torch.Tensor] = {}
    with CheckpointReader(states) as reader:
        for names, stored in reader.weights():
            found |= dict.fromkeys(names, _value(reader, stored, stored.info.shape))
    return found
