"""Values for a group's parameters: the model's own, freshly initialised, or from safetensors.

A model built on the meta device has shapes and no values. Each module with parameters of its own is
given real memory, one group at a time, and initialised by what would initialise it in a constructor
(`initialisers`), under a seed made from the run's seed and the module's name: the values do not
depend on grouping, order or placement. Fresh memory is filled with a value that no initialiser
writes; a tensor that still has it afterwards is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from offload.planning.activations.compiler_free import without_dynamo
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.initialisers import Call, Entry, Initialisers
from offload.zero.groups.discovery import managed

if TYPE_CHECKING:
    from offload.weights.safetensors_weights import SafetensorsWeights

_PIECE_NUMEL = 1 << 22


class MetaInitialiser:
    """Initialises the modules of a model that is on the meta device, or partly, one by one."""

    def __init__(
        self, model: nn.Module, seed: int, elsewhere: Container[torch.Tensor] = ()
    ) -> None:
        """`elsewhere` holds meta tensors whose values come from another source."""
        self._model = model
        self._seed = seed
        with without_dynamo():  # references of kernels import it, 95 MiB, for one answer
            self._plan = Initialisers(model)
        self._names = {id(module): name for name, module in model.named_modules()}
        for entry in self._plan.entries:
            entry.is_meta = entry.is_meta and entry.tensor not in elsewhere
        entries = sorted(self._plan.entries, key=lambda entry: entry.is_meta)
        self._entry = {id(entry.tensor): entry for entry in entries}  # that is to have values

    def check(self, files: SafetensorsWeights | None) -> None:
        """Raise UnsupportedError for tensors that neither `values` nor `files` can give."""
        entries = [entry for entry in self._plan.entries if entry.is_meta]
        if files is not None:
            # parameters come from the files, or are missed there
            entries = [
                e for e in entries if not e.is_parameter and not files.has(e.name)
            ]  # fmt: skip
        self._plan.refuse(entries)
        _refuse_attributes(self._model, self._entry)

    def values(self, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return values, in RAM, for those of `params` (by name, all of one group) without any."""
        entries = {name: self._entry[id(param)] for name, param in params.items()}
        entries = {name: entry for name, entry in entries.items() if entry.is_meta}
        found = self._initialise(entries.values())
        return {name: found[entry] for name, entry in entries.items()}

    def finish(self, files: SafetensorsWeights | None, device: torch.device) -> None:
        """Give values to all tensors that are in no group: buffers, integers."""
        entries = [
            entry for entry in self._plan.entries
            if entry.is_meta and not (entry.is_parameter and entry.tensor.is_floating_point())
        ]  # fmt: skip
        given = {} if files is None else {
            e: files.get_as(e.name, e.tensor) for e in entries if not _is_made_anew(e)
        }  # fmt: skip
        missing = [entry for entry in entries if given.get(entry) is None]
        for entry, value in {**given, **self._initialise(missing)}.items():
            assert value is not None, "given, or initialised"
            old, new = entry.tensor, value.to(device)
            if entry.is_parameter:
                old.data = new
                continue
            for each in (e for e in self._plan.entries if e.tensor is old):
                each.tensor = new
                each.install(new)
                for owner in each.owners:
                    _replace_attributes(owner.module, old, new)

    # ---------------------------------------------------------------- module by module
    def _initialise(self, entries: Iterable[Entry]) -> dict[Entry, torch.Tensor]:
        with torch.random.fork_rng(devices=[]), self._plan.twins_installed():
            found: dict[nn.Module, dict[Entry, torch.Tensor]] = {}
            for module in (entry.owners[0].module for entry in entries):
                if module not in found:
                    found[module] = self._of_module(module, module)
            values = {e: found[e.owners[0].module][e] for e in entries}
            for entry, value in values.items():
                self._check_tied(entry, value)
            return values

    def _check_tied(self, entry: Entry, value: torch.Tensor) -> None:
        """Check that all modules that share a tensor give it the same values under the first one's
        seed: the model does not say which of them initialised it."""
        first, *others = entry.owners
        for other in others:
            if not torch.equal(self._of_module(other.module, first.module)[entry], value):
                raise UnsupportedError(
                    f"{entry.name} on the meta device is {other.name}, too, and their modules "
                    "would initialise it in different ways: it is not known which one the model "
                    "began with; build the model on the CPU (not under torch.device('meta') or "
                    "zero.Init), or pass weights= with safetensors files"
                )

    def _of_module(self, module: nn.Module, seeded_as: nn.Module) -> dict[Entry, torch.Tensor]:
        """Return the values of a module's own tensors."""
        own = [entry for entry in self._plan.of_module[id(module)] if entry.is_meta]
        calls = self._plan.calls_for(module)
        name = self._names[id(seeded_as)]
        values = self._run(own, calls, name, fill=0)
        exact = {entry for entry in own if not _has_nan(entry)}
        again = self._run(own, calls, name, fill=1) if exact else values
        for entry, value in values.items():
            unwritten = not torch.equal(value, again[entry]) if entry in exact else _is_nan(value)
            if unwritten:
                raise UnsupportedError(
                    f"{entry.name} on the meta device is not initialised everywhere by "
                    f"{type(module).__name__}.reset_parameters() or _init_weights; build the model "
                    "on the CPU, or pass weights= with safetensors files"
                )
        return values

    def _run(
        self, own: list[Entry], calls: list[Call], name: str, *, fill: int
    ) -> dict[Entry, torch.Tensor]:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        try:
            for entry in own:
                entry.install(entry.like(_filled(entry, fill)))
            for call in calls:
                call.run()
            found = {entry: entry.owners[0].get(is_parameter=entry.is_parameter) for entry in own}
        finally:
            for entry in own:
                entry.install(entry.twin)
        return {entry: _checked(entry, value) for entry, value in found.items()}


def _has_nan(entry: Entry) -> bool:
    return entry.tensor.is_floating_point() or entry.tensor.is_complex()


def _filled(entry: Entry, fill: int) -> torch.Tensor:
    value = float("nan") if _has_nan(entry) else fill
    return torch.full(entry.twin.shape, value, dtype=entry.twin.dtype, device="cpu")


def _is_nan(value: torch.Tensor) -> bool:
    return bool(value.sum().isnan()) and bool(value.isnan().any())


def _checked(entry: Entry, value: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor that an initialiser may have replaced, after a check."""
    if value is None or value.is_meta or value.shape != entry.twin.shape:
        raise UnsupportedError(
            f"{entry.name} on the meta device: its initialiser left "
            f"{'nothing' if value is None else f'{tuple(value.shape)} on {value.device}'} in the "
            f"place of {tuple(entry.twin.shape)}; build the model on the CPU"
        )
    return value.detach()


def _refuse_attributes(model: nn.Module, known: Mapping[int, Entry]) -> None:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or id(value) in known:
                continue
            if value.is_meta and value.numel():
                raise UnsupportedError(
                    f"{name}.{key} is a tensor on the meta device that is neither parameter nor "
                    "buffer, and nothing gives it a value; set it again after building the model, "
                    "or build the model on the CPU"
                )


def _replace_attributes(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace the other names that a module has for a buffer."""
    for key, value in list(vars(module).items()):
        if value is old:
            vars(module)[key] = new


def make_real(
    named: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device,
    only: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Turn every meta parameter into one on `device` without memory of its own. It stays the same
    object: references to it stay valid. The values follow when the groups are loaded. `only`: of
    parameters in other formats, later still."""
    for name, param in named:
        if not param.is_meta:
            continue
        new = _placeholder(param, dtype if managed(param, only) else param.dtype, device)
        try:
            # As torch.utils.swap_tensors does, which keeps off tensors with weak references
            # (nn.LSTM has them): they are to the object, and that stays.
            torch._C._swap_tensor_impl(param, new)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{name} on the meta device is part of a graph ({error}); call offload.initialize "
                "before using the model"
            ) from error


def _is_made_anew(entry: Entry) -> bool:
    """Return whether the entry is a buffer that torch leaves out of a state dict."""
    owner = entry.owners[0]
    own = entry.name.rpartition(".")[2]
    return not entry.is_parameter and own in owner.module._non_persistent_buffers_set


def _placeholder(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    one = torch.zeros((), dtype=dtype, device=device)
    made = nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, hooks):
            setattr(made, hooks, getattr(param, hooks))
    return made


def check_shape(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        raise CheckpointError(f"weights: {name} has shape {found}, in the model {shape}")


def check_range(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a finite value would become infinite."""
    limit = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max <= limit:
        return
    for piece in tensor.reshape(-1).split(_PIECE_NUMEL):
        lost = piece[piece.isfinite() & piece.to(dtype).isinf()]
        if lost.numel():
            raise CheckpointError(
                f"weights: {name} ({tensor.dtype}) holds {float(lost[0]):g}, more than {dtype} can "
                f"({limit:g}); use a precision with a larger range"
            )
