"""The writes of a program to a group's parameters, noticed without a hook in PyTorch.

    param.add_(...)         autograd's counter of the parameter has gone on
    param.data.add_(...)    no counter does: the digest of the values is taken when `.data` is
    param.data = other      its values have another address, or strides, than the group gave them

Versions count updates and writes; a handle of a saved view remembers one (zero/hooks/handles.py).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.layout import ParamSpec
from offload.zero.groups.shared_views import check_format, covers
from offload.zero.tensors.local_tensors import hold, local_of


def digest(param: torch.Tensor) -> int:
    """Return a digest of the bytes of a parameter's values (of this rank's part)."""
    flat = local_of(param).detach().cpu().reshape(-1).view(torch.uint8)
    return int(xxhash.xxh3_64_intdigest(flat.numpy().data))


def _references(tensor: torch.Tensor) -> int:
    """Return how many tensors and Python storage objects refer to the memory of `tensor`."""
    memory = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(memory._cdata))


class WriteTracker:
    """Finds which parameters of a group were written to. For the thread of the model."""

    def __init__(self, params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec]) -> None:
        self._params = params
        self._specs = specs
        # the address and strides of each parameter's values when they were gathered last
        self._shown: list[tuple[int, tuple[int, ...]]] = []
        self._references = 0  # to the buffer's memory, when it was gathered last
        self._taken: dict[int, int] = {}  # parameters whose `.data` was taken -> digest then
        self._written = [param._version for param in params]  # counters of known writes
        # refuses a tensor that `.data` of a gathered parameter was set to
        self.check_assigned: Callable[[torch.nn.Parameter, torch.Tensor], None] = lambda *_: None
        self.kept = 0  # counts the users' writes that were kept, and no updates
        self.version = 0  # counts updates and users' writes
        self.updated_at = 0  # the version that the last update made
        self.written_at: dict[int, int] = {}  # the version that a user's write to a parameter made

    def note_update(self) -> None:
        self.version += 1
        self.updated_at = self.version

    def note_writes(self, indices: Iterable[int]) -> None:
        """Note that a user's writes to these parameters are kept."""
        self.kept += 1
        self.version += 1
        self.written_at.update(dict.fromkeys(indices, self.version))

    def note_shown(self, flat: torch.Tensor) -> None:
        """Note that the parameters' data are views of the buffer `flat` from here on."""
        self._shown = self._find_places()
        self._references = _references(flat)  # without tensors of the gathering, which are gone

    def changed(self, buffer: Callable[[], torch.Tensor] | None) -> list[int]:
        """Return the parameters (by index) that were written to since the last call or
        `note_versions`, also through `.data`. Without a buffer, none can have been assigned."""
        assigned = [] if buffer is None else self.copy_assigned(buffer)
        with torch._C.DisableTorchFunctionSubclass():  # released ones would be asked one by one
            versions = [param._version for param in self._params]
        if not assigned and not self._taken and versions == self._written:
            return []
        through_data = [
            index for index, before in self._taken.items() if digest(self._params[index]) != before
        ]
        self._taken.clear()
        pairs = zip(versions, self._written, strict=True)
        self._written = versions
        written = [index for index, (now, known) in enumerate(pairs) if now != known]
        return sorted({*assigned, *through_data, *written})

    def note_versions(self) -> None:
        """Account for all writes up to now."""
        self._taken.clear()
        self._written = [param._version for param in self._params]

    def watch(self, index: int) -> None:
        """Note that `.data` of a parameter is taken: autograd counts no writes through it."""
        if index not in self._taken:
            self._taken[index] = digest(self._params[index])

    def copy_assigned(self, buffer: Callable[[], torch.Tensor]) -> list[int]:
        """Copy what `param.data` was set to into what `buffer` returns; return those parameters.

        Raises UnsupportedError for values of another shape, dtype or device, and if the user still
        refers to the previous `.data`: that is a view of the buffer, whose values would change.
        """
        places = self._find_places()
        if places == self._shown:
            return []
        pairs = zip(places, self._shown, strict=True)
        assigned = [index for index, (now, then) in enumerate(pairs) if now != then]
        with torch.inference_mode(False):
            self._copy_values(buffer(), assigned)
        return assigned

    def _copy_values(self, flat: torch.Tensor, assigned: Sequence[int]) -> None:
        self._refuse_kept(flat, assigned)
        values = {index: local_of(self._params[index]).detach() for index in assigned}
        for index, given in values.items():
            spec = self._specs[index]
            check_format(spec.name, given, spec.shape, flat.dtype, flat.device)
        for index, given in values.items():
            own = self._specs[index].of(flat)
            if covers(own, given):
                values[index] = given.clone()  # `w.data.t()`
            else:
                self.check_assigned(self._params[index], given)
        for index, given in values.items():
            view = self._specs[index].of(flat)
            view.copy_(given)
            hold(self._params[index], view)

    def _refuse_kept(self, flat: torch.Tensor, assigned: Sequence[int]) -> None:
        memory = flat.untyped_storage()._cdata
        now = [local_of(self._params[index]).untyped_storage()._cdata for index in assigned]
        left = sum(each != memory for each in now)
        if _references(flat) > self._references - left:
            names = ", ".join(self._specs[index].name for index in assigned)
            raise UnsupportedError(
                f"{names}: .data was set to another tensor while something else refers to the "
                "values from before, which are overwritten in the engine's tiers: a tensor of the "
                "program (backup = p.data), or the graph of a forward whose output is still there; "
                "keep copies (backup = p.data.clone()), compute that forward within "
                "torch.no_grad(), or write with p.data.copy_(...)"
            )

    def _find_places(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return each parameter's address and strides: `w.data.t()` is at the same address."""
        return [(memory.data_ptr(), memory.stride()) for memory in map(local_of, self._params)]
