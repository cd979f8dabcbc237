"""An engine's states for `torch.distributed.checkpoint`, one tensor at a time.

    import torch.distributed.checkpoint as dcp

    dcp.save({"app": EngineState(engine)}, checkpoint_id="checkpoint")
    dcp.load({"app": EngineState(engine)}, checkpoint_id="checkpoint")

Torch's reader unpickles: it runs what the folder's author wrote. Load only folders that you trust.

The entries have the names of torch's `get_state_dict(model, optimizer)`, so each of the two loads
the checkpoints of the other. That function returns copies of all states at once. These tensors are
read when they are written to a file, and written to the tiers when they are read from one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from offload.integrations.entry_tensors import Entry, EntryTensor
from offload.process.machine import trim_memory
from offload.tiers.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from offload.engine import Engine

_TRIM_NBYTES = 64 << 20
_HALF_LOADED = (
    "torch.distributed.checkpoint.load failed half-way, so parameters and optimizer states are a "
    "mixture; load a checkpoint again, or make a new engine"
)


def _tensors(state_dict: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a model and of an optimizer's states, with their names."""
    yield from state_dict["model"].items()
    for name, states in state_dict["optim"]["state"].items():
        yield from ((f"{name}.{field}", value) for field, value in states.items())


def _check_numbers(engine: Engine, group: dict[str, Any], found: dict[str, Any]) -> None:
    try:
        engine.optimizer.check_numbers(group, found)
    except (ValueError, UnsupportedError) as error:
        raise CheckpointError(
            f"the checkpoint has a param group that this optimizer cannot take over: {error}; load "
            "another one"
        ) from None


def _steps(name: str, state: dict[str, Any]) -> int:
    """Return a parameter's step count. Raise CheckpointError if the number cannot be one."""
    found = float(state["step"])
    if not 0 <= found < 1 << 62:  # not NaN either
        raise CheckpointError(f"{name} was updated {found} times; load another checkpoint")
    return int(found)


class EngineState(Stateful):
    """`Stateful` of an engine's model and optimizer: `{"model": ..., "optim": ...}`, tensors of the
    parameters' shapes whose values are read from the tiers, and written there, one at a time.

    Raises UnsupportedError on several ranks, and for a model with extra state of its own. The
    engine must not train between the beginning and the end of a save or load. After an interrupted
    load, the next use of the engine raises StateError.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.runtime.ranks is not None or engine.runtime.tensor_parallel is not None:
            raise UnsupportedError(
                "EngineState on several ranks: use engine.save_checkpoint, which any number of "
                "ranks can load, or torch's get_state_dict(model, optimizer), which holds copies "
                "of all states"
            )
        self._engine = engine
        self._lock = threading.Lock()
        self._untrimmed_nbytes = 0
        self._whole: set[int] = set()  # parameters whose master was loaded, by id
        self._given: dict[str, Tensor] = {}  # to be filled, by name

    def state_dict(self) -> dict[str, Any]:
        """Return tensors without memory of their own. Every state is there, also before the first
        step: a load fills the tensors that it finds here."""
        engine, store = self._engine, self._engine.runtime.store
        self._whole.clear()
        unusable, store.unusable = store.unusable, None  # a load is a way out of that
        try:
            if unusable is None:
                engine.values.adopt_changes()
            engine.settle()
            given = {"model": self._model(), "optim": self._optimizer()}
            self._given = dict(_tensors(given))
            return given
        finally:
            store.unusable = unusable

    def _check_tensors(self, state_dict: dict[str, Any]) -> None:
        """Check that tensors are tensors: `dcp.load` replaces one that it should have filled by
        another object."""
        found = dict(_tensors(state_dict))
        for name, tensor in self._given.items():
            if found.get(name) is not tensor:
                raise CheckpointError(
                    f"{name} is no tensor in the checkpoint, and was not loaded; load another one"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the numbers; `dcp.load` calls this when all tensors are loaded. Raise
        CheckpointError for numbers that cannot be trained with, and if an entry in the folder was
        not a tensor."""
        engine, optimizer = self._engine, state_dict["optim"]
        with self._access(0, changes=True):
            self._check_tensors(state_dict)
            numbers = [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer["param_groups"]
            ]
            groups = engine.optimizer.param_groups
            for group, found in zip(groups, numbers, strict=True):
                _check_numbers(engine, group, found)
            steps = {name: _steps(name, optimizer["state"][name]) for name, _ in self._trained()}
            for name, param in self._trained():
                engine.values.write_steps(param, steps[name])
            for group, found in zip(groups, numbers, strict=True):
                group.update(found)
            engine.runtime.stepper.forget()
        engine.runtime.store.unusable = None

    # ---------------------------------------------------------------- entries
    def _model(self) -> dict[str, Any]:
        store = self._engine.runtime.store
        found: dict[str, Any] = {}
        for name, value in self._engine.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise UnsupportedError(
                    f"{name} is extra state of a module ({type(value).__name__}), which has no "
                    "tensor to stream; save it beside the engine, or use engine.save_checkpoint"
                )
            if isinstance(value, nn.Parameter) and store.spec_of(value) is not None:
                found[name] = self._weight(value)
            else:
                found[name] = value.detach()
        return found

    def _optimizer(self) -> dict[str, Any]:
        names = {id(param): name for name, param in self._engine.module.named_parameters()}
        groups = [
            {**group, "params": [names[id(param)] for param in group["params"]]}
            for group in self._engine.optimizer.param_groups
        ]
        states = {name: self._states(param) for name, param in self._trained()}
        return {"state": states, "param_groups": groups}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that have states of the optimizer, with their names."""
        names = {id(param): name for name, param in self._engine.module.named_parameters()}
        for group in self._engine.optimizer.param_groups:
            for param in group["params"]:
                if self._engine.values.is_trained(param):
                    yield names[id(param)], param

    def _states(self, param: nn.Parameter) -> dict[str, Tensor]:
        values = self._engine.values
        found: dict[str, Tensor] = {"step": torch.tensor(float(values.read_steps(param)))}
        for field in values.fields(param):
            found[field] = self._field(param, field)
        return found

    # ---------------------------------------------------------------- tensors
    def _weight(self, param: nn.Parameter) -> Tensor:
        def write(value: Tensor) -> None:
            if id(param) not in self._whole:  # else its master is there, which has more bits
                with engine.values.gathered([param]), torch.no_grad():
                    param.copy_(value)

        def read() -> Tensor:
            with engine.values.reading([param]):
                return param.detach().cpu().clone()

        engine = self._engine
        dtype = engine.runtime.options.dtype
        entry = Entry(self._access, param.numel() * dtype.itemsize, read, write)
        return EntryTensor(entry, (), torch.empty(param.shape, dtype=dtype, device="meta"))

    def _field(self, param: nn.Parameter, field: str) -> Tensor:
        def write(value: Tensor) -> None:
            if field == "master":
                self._whole.add(id(param))
            values.write(param, field, value)

        values = self._engine.values
        entry = Entry(
            self._access, param.numel() * 4, lambda: values.read(param, field).cpu(), write
        )
        return EntryTensor(entry, (), torch.empty(param.shape, dtype=torch.float32, device="meta"))

    @contextmanager
    def _access(self, nbytes: int, *, changes: bool) -> Iterator[None]:
        """Give access to one tensor at a time: DCP may write files with several threads."""
        store = self._engine.runtime.store
        with self._lock:
            self._untrimmed_nbytes += nbytes
            if self._untrimmed_nbytes > _TRIM_NBYTES:  # copies of all sizes come and go
                trim_memory()
                self._untrimmed_nbytes = 0
            if not changes:
                yield
                return
            store.unusable = None  # for this load, which overwrites everything
            try:
                yield
            finally:
                store.unusable = _HALF_LOADED
