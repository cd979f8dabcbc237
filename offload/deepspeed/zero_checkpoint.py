"""Reads checkpoints of DeepSpeed's ZeRO stages 1 to 3, of one model-parallel rank.

    *_model_states.pt    names and shapes of each param group, buffers, frozen parameters, counters
    *_optim_states.pt    one per rank: fp32 masters and states, flat

Stages 1 and 2 cut a param group's flat vector into one part per rank; stage 3 cuts each parameter,
and lines up the parts. The files are pickles, read by `torch.load(weights_only=True)`: classes
that they name are not imported.
"""

import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from offload.checkpoint.foreign.model_files import own_file
from offload.checkpoint.format.user_state import refusals
from offload.tiers.errors import CheckpointError, NoCheckpointError

Shapes = Mapping[str, tuple[int, ...]]


class ZeroCheckpoint:
    """A checkpoint folder. Raises CheckpointError for files that are none, or inconsistent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        experts = sorted(path.name for path in folder.glob("*expert_*_model_states.pt"))
        if experts:
            raise CheckpointError(
                f"{folder}: a mixture of experts ({len(experts)} files of experts, the first "
                f"{experts[0]}), which is not imported; load the weights of these files into the "
                "model, by their names there, and begin a new optimizer"
            )
        parts = sorted(folder.glob("*_optim_states.pt"), key=_rank_of)
        if not parts or any("mp_rank_00" not in path.name for path in parts):
            raise NoCheckpointError(
                f"{folder}: no checkpoint of ZeRO without model parallelism (no "
                "*mp_rank_00_optim_states.pt, or others beside); name the folder of one tag"
            )
        self._parts = [_load(path)["optimizer_state_dict"] for path in parts]
        self.stage = _number(self._parts[0].get("zero_stage"), folder)
        counts = self._parts[0].get("partition_count")
        ranks = max(counts) if isinstance(counts, list) else counts
        if ranks != len(parts):
            raise CheckpointError(f"{folder}: files of {len(parts)} ranks, {ranks} had written")
        self.ranks = len(parts)
        name = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
        models = [name.format(rank) for rank in range(self.ranks if self.stage == 3 else 0)]
        self._models = [_load(folder / each) for each in models or ["mp_rank_00_model_states.pt"]]

    @property
    def about(self) -> Mapping[str, Any]:
        """Counters, the scheduler's state, the configuration, and the client's entries."""
        return self._models[0]

    @cached_property
    def groups(self) -> list[Shapes]:
        """The shapes of trained parameters by param group; stage 3 has several parts of each."""
        parts = iter(self.about["param_shapes"])
        return [
            {name: tuple(shape) for _ in group["params"] for name, shape in next(parts).items()}
            for group in self._state_dict(0)["param_groups"]
        ]

    @cached_property
    def frozen(self) -> Shapes:
        shapes = {n: tuple(s) for n, s in (self.about.get("frozen_param_shapes") or {}).items()}
        if self.stage < 3:  # stage 1 has no such list, and every parameter whole
            trained = {name for group in self.groups for name in group}
            others = set(self.names) - trained - self.shared.keys() - shapes.keys()
            shapes |= {n: tuple(self.about["module"][n].shape) for n in self.names if n in others}
        return shapes

    @property
    def shared(self) -> dict[str, str]:
        """The saved name of a tied parameter by each of its other names. Stage 3 records none."""
        return dict(self.about.get("shared_params") or {})

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        names = set(self.about["buffer_names"])
        return {name: t for name, t in self.about["module"].items() if name in names}

    @property
    def names(self) -> list[str]:
        """The names of all parameters, tied ones under each of their names."""
        return [name for name in self.about["module"] if name not in self.buffers]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computed in."""
        tensors = [self.about["module"][name] for name in self.names]
        dtype: torch.dtype = next(t.dtype for t in tensors if t.is_floating_point())
        return dtype

    @cached_property
    def numbers(self) -> list[dict[str, Any]]:
        """The numbers of each param group."""
        groups: list[dict[str, Any]] = self._state_dict(0)["param_groups"]
        return [{key: value for key, value in g.items() if key != "params"} for g in groups]

    @cached_property
    def state_names(self) -> set[str]:
        """The names of the optimizer's states, without `step`."""
        states = self._state_dict(0)["state"].values()
        return {k for s in states for k, v in s.items() if isinstance(v, torch.Tensor) and v.dim()}

    @cached_property
    def steps(self) -> int:
        """The number of updates so far: that of the first state, else according to the counters."""
        for state in (*self._state_dict(0)["state"].values(), *self.numbers):
            if "step" in state:
                return int(state["step"])
        return int(self.about["global_steps"]) - int(self.about["skipped_steps"])

    @property
    def loss_scale(self) -> float:
        """The loss scale of fp16 when it was saved; if the file lacks it, the initial one."""
        scaler = self._parts[0].get("loss_scaler")
        state = scaler.state if isinstance(scaler, _Opaque) else None
        return float(state["cur_scale"]) if isinstance(state, dict) else 65536.0

    def _state_dict(self, rank: int) -> dict[str, Any]:
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        state: dict[str, Any] = self._parts[rank][key]
        return state

    def tensors(self, field: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `master`, or one of `state_names`, of each trained parameter, fp32, one at a
        time."""
        read = self._whole if self.stage == 3 else self._cut
        for name, value in read(field):
            yield name, value.float()

    def _flats(self, rank: int, field: str) -> list[torch.Tensor]:
        """Return a rank's vectors, one per (sub)group."""
        part = self._parts[rank]
        if field == "master":
            key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
            return [each.detach().reshape(-1) for each in part[key]]
        states = self._state_dict(rank)["state"]
        return [states[number][field].detach().reshape(-1) for number in sorted(states)]

    def _cut(self, field: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a checkpoint of stage 1 or 2."""
        flats = [self._flats(rank, field) for rank in range(self.ranks)]
        paddings = self._parts[0].get("param_alignment_paddings")
        for number, shapes in enumerate(self.groups):
            vectors, start = [each[number] for each in flats], 0
            for index, (name, shape) in enumerate(shapes.items()):
                numel = math.prod(shape)
                yield name, _read(vectors, start, numel, name).view(shape)
                start += numel + (0 if paddings is None else int(paddings[number][index]))

    def _whole(self, field: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a checkpoint of stage 3."""
        flats, start = [self._flats(rank, field) for rank in range(self.ranks)], 0
        for shapes in self.groups:
            for name, shape in shapes.items():
                numel = math.prod(shape)
                part = -(-numel // self.ranks)
                parts = [_read(each, start, part, name) for each in flats]
                yield name, torch.cat(parts)[:numel].view(shape)
                start += part

    def frozen_value(self, name: str) -> torch.Tensor:
        """Return the value of a frozen parameter."""
        shape = self.frozen[name]
        if self.stage < 3:
            value: torch.Tensor = self.about["module"][name]
            return value
        parts = [each["frozen_param_fragments"][name].reshape(-1) for each in self._models]
        return torch.cat(parts)[: math.prod(shape)].view(shape)


def _read(parts: Sequence[torch.Tensor], start: int, numel: int, name: str) -> torch.Tensor:
    """Elements of vectors that are end to end, without a copy of the whole."""
    pieces, begin = [], 0
    for part in parts:
        lo, hi = max(start, begin), min(start + numel, begin + part.numel())
        if lo < hi:
            pieces.append(part[lo - begin : hi - begin])
        begin += part.numel()
    if sum(each.numel() for each in pieces) != numel:
        raise CheckpointError(f"{name}: {numel} elements from {start} on are not in the files")
    return torch.cat(pieces) if pieces else torch.empty(0)


def _rank_of(path: Path) -> int:
    return int(path.name.partition("pp_rank_")[2].partition("_")[0] or 0)


def _number(value: Any, folder: Path) -> int:
    """Return the stage: an enum of DeepSpeed is inert data here, with its number as an argument."""
    number = value.arguments[0] if isinstance(value, _Opaque) and value.arguments else value
    if number not in (1, 2, 3):
        raise CheckpointError(f"{folder}: no checkpoint of ZeRO stage 1, 2 or 3")
    return int(number)


# ---------------------------------------------------------------- files
class _Opaque:
    """An object of a class that is not imported: the `arguments` and the `state` in its pickle."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> Self:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _load(path: Path) -> dict[str, Any]:
    """Read a file whose tensors stay in it, mapped into memory. Objects of other classes than
    PyTorch's become `_Opaque`. Raises CheckpointError for a file that is missing, damaged, or holds
    what `weights_only` refuses."""
    path = own_file(path.parent, path.name)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path} is no regular file; get the folder again")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; get the folder again") from None
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from None
    with refusals(str(path)):
        names = get_unsafe_globals_in_checkpoint(str(path))
        with safe_globals([(_Opaque, name) for name in names]):
            content: dict[str, Any] = torch.load(
                path, map_location="cpu", weights_only=True, mmap=True
            )
    return content
