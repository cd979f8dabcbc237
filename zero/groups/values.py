"""Reading and writing whole values of parameters and their optimizer states, from outside a step.

Everything here waits for the pending updates it needs, and works through the same states that the
step works through: at most one group's weights and one record are in memory at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.kernels.bits import array_of, flat_array
from offload.kernels.cpu.convert import decode, join_master
from offload.kernels.floats import Array, Float
from offload.kernels.variants import Master
from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.tiers.errors import StateError
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.loading import store_full
from offload.zero.groups.weight_values import WeightValues
from offload.zero.step.optimizer_state import OptimizerState
from offload.zero.step.records import RecordFormat
from offload.zero.step.runtime import Runtime
from offload.zero.tensors.local_tensors import like, spread_as


@dataclass(frozen=True, slots=True)
class _ParamInChunk:
    """A chunk that a parameter lies in: where in the chunk, and where in the parameter."""

    arrays: dict[str, Array]  # of its record
    record_format: RecordFormat
    weights: Array
    here: slice
    there: slice


class ParameterValues(WeightValues):
    """Access to the values behind a runtime's parameters, fp32 where there is a master."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.store)
        self._runtime = runtime
        self._own: Float = runtime.own

    @interrupted_in_waits
    def read(self, param: nn.Parameter, field: str) -> torch.Tensor:
        """Return a copy of one of the optimizer's states or of `master` (fp32, the shape of the
        parameter; a DTensor where that is one)."""
        packed = self._store.packed_of(param)
        if packed is not None:
            return torch.stack([self.read(row, field) for row in packed.rows])
        group, index = self._find(param)
        spec = group.layout.params[index]
        out = np.zeros(spec.numel, dtype=np.float32)
        host = self._host_weights(group)
        for chunk in self._chunks(group, index, host, write=False):
            out[chunk.there] = (
                self._master(chunk) if field == "master"
                else chunk.record_format.read_state(chunk.arrays, field, chunk.here)
            )  # fmt: skip
        ranks = self._runtime.rank_work.of(group.ep_size)
        whole = ranks.combine(torch.from_numpy(out), f"{field} of {spec.name}")
        return like(param, whole.view(spec.shape))

    def master(self, param: nn.Parameter) -> torch.Tensor | None:
        has_one = self.is_trained(param) and "master" in self.fields(param)
        return self.read(param, "master") if has_one else None

    @defer_signals
    def write(self, param: nn.Parameter, field: str, value: torch.Tensor) -> None:
        """Overwrite one of the arrays that `read` names, of a trained parameter that is not packed;
        `master` sets the weight as well."""
        group, index = self._find(param)
        spec, value = group.layout.params[index], spread_as(param, value)
        if tuple(value.shape) != tuple(spec.shape):
            raise StateError(
                f"{field} of {spec.name} has shape {tuple(value.shape)}, expected "
                f"{tuple(spec.shape)}"
            )
        flat = flat_array(value.detach().to("cpu", torch.float32).contiguous())
        host = self._host_weights(group)
        if field == "master":
            group.copies.overwritten()  # before as well: no rank uses what it is sent meanwhile
        for chunk in self._chunks(group, index, host, write=True):
            if field == "master":
                there = chunk.arrays.keys() & {"low", "master"}
                store_full(
                    np.ascontiguousarray(flat[chunk.there]), chunk.weights[chunk.here], self._own,
                    # no name for them: it would keep the record in memory
                    {name: chunk.arrays[name][chunk.here] for name in there},
                )  # fmt: skip
            else:
                values = flat[chunk.there]
                chunk.record_format.write_state(chunk.arrays, field, chunk.here, values)
        if field == "master":
            group.state.mark_host_dirty()
        del host  # not before: a copy without views may be dropped

    def _host_weights(self, group: ParamGroup) -> torch.Tensor:
        group.pending_update.wait()
        return group.state.host_tensor()

    def _master(self, chunk: _ParamInChunk) -> Array:
        arrays, here = chunk.arrays, chunk.here
        weights = chunk.weights[here]
        if "master" in arrays:
            return arrays["master"][here].copy()
        full = np.empty(len(weights), dtype=np.float32)
        if "low" in arrays:
            join_master(weights, np.ascontiguousarray(arrays["low"][here]), full)
        else:
            decode(weights, full, self._own)
        return full

    def _chunks(
        self, group: ParamGroup, index: int, host: torch.Tensor, *, write: bool
    ) -> Iterator[_ParamInChunk]:
        """Yield the chunks of this rank's part of a group that a parameter lies in; `host` has the
        group's weights."""
        state = self._state_of(group)
        if index not in state.parts:
            return
        if write:
            self._runtime.updates.gate.await_admission(group.index)
        part = state.parts[index]
        spec = part.spec
        weights = state.part.trained_in(array_of(host, self._own))
        kept = state.record_format
        for elements, record in zip(state.chunks, state.records, strict=True):
            lo, hi = max(spec.offset, elements.start), min(spec.stop, elements.stop)
            if lo >= hi:
                continue
            here = slice(lo - elements.start, hi - elements.start)
            there = slice(lo - spec.offset + part.start, hi - spec.offset + part.start)
            if write:
                record.settle()
            buffer = record.tensor()
            arrays = kept.arrays(buffer, len(elements))
            yield _ParamInChunk(arrays, kept, weights[elements.start : elements.stop], here, there)
            if write:
                record.mark_dirty()
            # not before it was marked as written: a copy without views may be dropped; but now, or
            # the caller's name for the arrays would keep the record in memory
            arrays.clear()
            del buffer

    def is_trained(self, param: nn.Parameter) -> bool:
        """Return whether the optimizer may update it."""
        group, index = self._first(param)
        return group.layout.params[index].trainable

    def _first(self, param: nn.Parameter) -> tuple[ParamGroup, int]:
        """Return a parameter's place; for a packed one, its first row's, which all are like."""
        return self._find(self._store.rows_of(param)[0])

    def fields(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return the arrays of a trained parameter that `read` names."""
        kept = self._state_of(self._first(param)[0]).record_format
        return tuple(kept.states) if kept.master is Master.NONE else (*kept.states, "master")

    def read_steps(self, param: nn.Parameter) -> int:
        group, index = self._first(param)
        return int(self._state_of(group).steps[index])

    def write_steps(self, param: nn.Parameter, steps: int) -> None:
        for row in self._store.rows_of(param):
            group, index = self._find(row)
            group.pending_update.wait()  # also for missed steps: the step count includes them
            self._state_of(group).steps[index] = steps

    def read_state(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return `step`, the moments and, where there is one, `master`.

        It is empty before the first update, as in torch, but not where there is a master: it may
        have been made from values of more bits than the weight has.
        """
        names = self.state_names(param)
        return {
            name: torch.tensor(float(self.read_steps(param))) if name == "step"
            else self.read(param, name) for name in names
        }  # fmt: skip

    def state_names(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return the names of the states that `read_state` finds."""
        if not self.is_trained(param):
            return ()
        fields = self.fields(param)
        return ("step", *fields) if self.read_steps(param) or "master" in fields else ()

    @defer_signals
    def write_state(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """The reverse of `read_state`: an empty state is that before the first update, with the
        weight as it is."""
        packed = self._store.packed_of(param)
        if packed is not None:
            for number, row in enumerate(packed.rows):
                self.write_state(row, _row_of(state, number))
            return
        group, index = self._find(param)
        spec = group.layout.params[index]
        if not spec.trainable:
            return
        self.write_steps(param, int(state.get("step", 0)))
        for name in self._state_of(group).record_format.states:
            value = state.get(name)
            self.write(param, name, torch.zeros(spec.shape) if value is None else value)
        if "master" in state:
            self.write(param, "master", state["master"])

    def accept(self, group: ParamGroup, indices: Sequence[int]) -> None:
        self._runtime.updates.gate.await_admission(group.index)
        super().accept(group, indices)

    def _follow(self, group: ParamGroup, index: int) -> None:
        """Update the master of a parameter that was written to its value."""
        host = self._host_weights(group)
        for chunk in self._chunks(group, index, host, write=True):
            if "low" in chunk.arrays:
                chunk.arrays["low"][chunk.here] = 0
            elif "master" in chunk.arrays:
                full = np.empty(chunk.here.stop - chunk.here.start, dtype=np.float32)
                decode(chunk.weights[chunk.here], full, self._own)
                chunk.arrays["master"][chunk.here] = full

    @interrupted_in_waits
    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the gradient, in the format in which it was accumulated, or None."""
        packed = self._store.packed_of(param)
        if packed is not None:
            return self._runtime.packed_gradients.value(packed)
        self._find(param)
        return self._runtime.gradients.value(param)

    def close_states(self, group: ParamGroup) -> None:
        super().close_states(group)
        state = self._state_of(group)
        for each in (state.gradients.state, *state.records):
            if not each.has_views():
                each.close()

    def _state_of(self, group: ParamGroup) -> OptimizerState:
        return self._runtime.optimizer_states[group.index]


def _row_of(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Return one row's part of the state of a packed parameter."""
    return {
        name: value[number] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in state.items()
    }
