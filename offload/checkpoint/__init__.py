"""Checkpoints: a folder of safetensors files and a manifest, complete or absent.

    step-000100/
        manifest.json                   names, shapes, steps, numbers, XXH3 of every file's blocks
        parameters/000.safetensors      one file per group: true names and shapes, model precision
        optimizer/000.safetensors       NAME.exp_avg, NAME.exp_avg_sq, NAME.low or NAME.master, ...
        buffers.safetensors             persistent buffers (others are the model's code to rebuild)
        run.safetensors                 what goes on beside the engine: generators, ...

Nothing in it says where a state lived or how it was cut into chunks: it loads under any placement,
budget, chunk size and grouping. There is no file that names the latest
checkpoint: a folder without a suffix is complete, so there is nothing that could disagree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from offload.checkpoint.format.steps import latest, prune, step_path
from offload.config.paths import StrPath, path_of

if TYPE_CHECKING:
    from offload.checkpoint.engine.background import BackgroundSaves
    from offload.models.trained import Trained

__all__ = ["latest", "load", "prune", "save", "save_behind", "step_path"]


def save(engine: Trained, path: StrPath, state: Mapping[str, Any] | None = None) -> None:
    """Write the engine's state to the folder `path`, replacing an existing checkpoint, with
    random numbers, the configuration, registered objects, and `state`, which has plain values.

    Waits for pending updates first and changes nothing in the engine. Streams: beyond the engine's
    budgets it holds one chunk. Whenever the process dies, `path` holds the old checkpoint or the
    new one, complete. Gradients are not part of a checkpoint.

    Processes may save beside each other. One that loads what another process replaces meanwhile
    gets a CheckpointError. Files that no checkpoint has are never replaced or removed.

    Raises StateError while gradients wait for a step, inside `engine.gathered`, or after a load
    that failed half-way; PathError if `path` cannot be written or holds something else;
    NoSpaceError and StorageError for errors of the disk. The old checkpoint is intact then.
    """
    from offload.checkpoint.engine.saving import save_engine

    save_engine(engine, path_of(path, "path"), state)


def save_behind(
    engine: Trained, path: StrPath, state: Mapping[str, Any] | None, saves: BackgroundSaves,
    done: Callable[[], None],
) -> bool:  # fmt: skip
    """Like `save`, but return once the state is fixed, and write it while the engine trains;
    `done()` is called on another thread when it is complete. Returns False, after logging the
    reason once, if that is impossible: nothing was begun then."""
    from offload.checkpoint.engine.background import BackgroundSave, why_not

    reason = why_not(engine)
    if reason:
        saves.say_once(f"save_checkpoint(wait=False) waits: {reason}")
        return False
    BackgroundSave(engine, path_of(path, "path"), state, saves, done)
    return True


def load(engine: Trained, path: StrPath) -> dict[str, Any]:
    """Load the checkpoint `path`, saved under any placement, budget or chunk size. Returns the
    `state` that it was saved with.

    Sets parameters, optimizer states, step counts, the param groups' numbers, the loss scale,
    persistent buffers, random numbers and registered objects; forgets gradients. Training then
    goes on bit for bit as it would have.

    Everything is read once, and each block is compared with its hash as it comes. Whether the
    checkpoint is of this engine, and has all files and tensors, is known before: such a
    CheckpointError leaves the engine as it was. A damaged block, a StorageError, or a module whose
    `load_state_dict` refuses its buffers or extra state is met half-way and leaves a mixture, so
    the engine then refuses to train, read or save (StateError) until a load succeeds. `offload
    checkpoint verify` looks without loading.
    """
    from offload.checkpoint.engine.loading import load_engine

    return load_engine(engine, path_of(path, "path"))
