"""A checkpoint of another framework as a folder: the engine's states beside all else.

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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.checkpoint import model
from offload.checkpoint.disk import storage_errors, sync_folder
from offload.checkpoint.folder import discard
from offload.checkpoint.reader import CheckpointReader
from offload.swap.maker_marks import marked
from offload.tiers.errors import CheckpointError, PathError

if TYPE_CHECKING:
    from offload.engine import Engine

STATE, _STATES = "state.ckpt", "offload_states"
_STATES_NAME = re.compile("states-[0-9a-f]{8}")


def is_streamed(path: Any) -> bool:
    """Whether it is a folder that `save` wrote."""
    return (Path(path) / STATE).is_file()


def save(
    engine: Engine, path: Any, state: dict[str, Any], agree: Callable[[str], str], *, writes: bool
) -> None:
    """The engine's states, and `state` by `torch.save`. Of several ranks all have to call it; the
    one that `writes` writes, and `agree` gives its text to all.

    PathError where `path` is not a folder here, or one with other contents; errors of
    `engine.save_checkpoint`.
    """
    if "://" in str(path):
        raise PathError(
            f"{path}: an engine's states are streamed into a local folder; name one, and copy it"
        )
    folder = Path(path)
    if folder.exists() and not is_streamed(folder) and not _is_empty(folder):
        raise PathError(f"{folder} holds something else than a checkpoint; name another path")
    with storage_errors("creating", folder):
        folder.mkdir(parents=True, exist_ok=True)
    states = agree(f"states-{secrets.token_hex(4)}")
    engine.save_checkpoint(folder / states)
    if not writes:
        return
    pending = folder / marked(f".{STATE}")
    with storage_errors("writing", folder), pending.open("wb") as file:
        torch.save({**state, _STATES: states}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(pending, folder / STATE)
    sync_folder(folder)
    for other in _all_states(folder):
        if other.name != states:
            discard(other)


def _all_states(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if _STATES_NAME.fullmatch(each.name)]


def _is_empty(folder: Path) -> bool:
    """But for what a save left that was killed."""
    return folder.is_dir() and all(
        each.name.startswith(("states-", f".{STATE}")) for each in folder.iterdir()
    )


def read(path: Any, load: Callable[[Path], dict[str, Any]]) -> tuple[dict[str, Any], Path]:
    """What was saved beside the engine's states, read by `load`, and where these are."""
    folder = Path(path)
    state = load(folder / STATE)
    name = str(state.pop(_STATES, "nothing"))
    states = folder / name
    if not _STATES_NAME.fullmatch(name) or not states.is_dir():
        raise CheckpointError(f"{states} is missing, which {folder / STATE} names; load another")
    return state, states


def load_state(path: Path, *, trust: bool) -> dict[str, Any]:
    """A `state.ckpt`, a file of `torch.save`. CheckpointError where it holds more than tensors and
    plain values, unless `trust`: what is more is made by code that the file names."""
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
    """Of what torch says, which goes on with how to switch the check off."""
    lines = [
        line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "class" in line
    ]
    return (lines or str(error).splitlines() or ["no reason given"])[0][:200]


def remove(path: Any) -> None:
    """A folder that `save` wrote. What is left of a removal that is killed is no checkpoint."""
    folder = Path(path)
    (folder / STATE).unlink()
    for states in _all_states(folder):
        discard(states)
    shutil.rmtree(folder)


def load_weights(engine: Engine, states: Path) -> None:
    """Parameters and persistent buffers alone, whatever the optimizer was.

    CheckpointError unless `states` has them all, in the model's shapes.
    """
    params = dict(engine.module.named_parameters(remove_duplicate=False))
    others = model.other_tensors(engine)
    with CheckpointReader(states) as reader:
        reader.check(contents=True)
        manifest = reader.manifest
        saved = {name: each for each in manifest.parameters for name in each.names}
        buffers = {each.name: each for each in manifest.buffers}
        for name, tensor in (params | others).items():
            found = buffers.get(name) or saved.get(name)
            if found is None or tuple(found.shape) != tuple(tensor.shape):
                has = "not there" if found is None else f"of shape {tuple(found.shape)}"
                raise CheckpointError(
                    f"{states}: {name} {tuple(tensor.shape)} is {has}; it is of another model"
                )
        dtypes = {name: dtype for dtype, name in model.DTYPE_NAMES.items()}

        def value(like: torch.Tensor, record: Any, stored: Any, number: int = 0) -> torch.Tensor:
            read = torch.empty(like.shape, dtype=dtypes[record.dtype])
            if read.numel():
                view = read.reshape(-1).view(torch.uint8).numpy().data
                reader.read_into(stored, number * read.nbytes, view)
            return read

        with torch.no_grad():
            for name, param in engine.module.named_parameters():
                if name not in others:
                    record = saved[name]
                    for number, row in enumerate(engine.runtime.store.rows_of(param)):
                        with engine.gathered(row):
                            row.copy_(value(row, record, reader.parameter(record), number))
            for name, tensor in others.items():
                tensor.copy_(value(tensor, buffers[name], reader.buffer(buffers[name])))


def weights_of(states: Path) -> dict[str, torch.Tensor]:
    """A state dict of parameters and persistent buffers, by all their names, over the files'
    memory-mapped bytes: RAM that the system can take back."""
    from safetensors import safe_open

    with CheckpointReader(states) as reader:
        manifest = reader.manifest
    files = [group.parameters for group in manifest.groups] + [manifest.buffers_file]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(states / file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for record in manifest.parameters:
        found |= dict.fromkeys(record.names, found[record.names[0]])
    return found
