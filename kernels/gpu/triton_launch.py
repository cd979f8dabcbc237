"""Shared by the launchers of Triton kernels: finding the GPU, checking tensors, starting the
kernel.

A launcher has the shape of its CPU twin (`triton_optimizer` of `optimizer`, and so on), takes
tensors in device memory instead of arrays, and reads formats off their dtypes. It returns once the
kernel is in the queue of the device's current stream, allocates nothing and synchronises with
nothing.

Each combination of formats and options is compiled once per process and kept on disk by Triton:
changing scalars and lengths do not lead to another compilation. A tensor whose start is not a
multiple of 16 bytes does, and is slow; slices of aligned buffers at whole blocks avoid that. Triton
finds the compiled kernel of a call anew each time, in 20 us of the CPU; `launch` remembers it.

Triton is imported at the first call. Where TRITON_INTERPRET=1 was set by then, kernels run in
Triton's interpreter, on tensors in host memory: that is how they are tested without a GPU.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from offload.kernels.floats import Float
from offload.tiers import accelerator

Kernel = Any  # triton.JITFunction, or its interpreted twin

OLDEST_TRITON = (3, 6)  # before that, sqrt_rn and div_rn flush denormals: not the CPU's bits
_FLOATS = {torch.float32: Float.FP32, torch.bfloat16: Float.BF16, torch.float16: Float.FP16}


class TritonUnavailableError(RuntimeError):
    """Triton kernels cannot run here; the message says what is missing."""


def missing(device: torch.device | None = None) -> str | None:
    """The reason why Triton kernels cannot run on an accelerator's `device`, by default the one
    that this machine has, as a sentence; None if they can run."""
    try:
        import triton
    except ImportError:
        return "triton is not installed: pip install 'offload[gpu]'"
    if _version(triton.__version__) < OLDEST_TRITON:
        wanted = ".".join(map(str, OLDEST_TRITON))
        return f"triton {wanted} or later is needed, {triton.__version__} is installed"
    if triton.knobs.runtime.interpret:
        return None
    if device is None and accelerator.default() is None:
        return "torch sees no CUDA device; kernels for host memory are in kernels.optimizer"
    return None


@cache
def loaded(module: str, name: str) -> Kernel:
    """The kernel `name` of a module here; TritonUnavailableError says why it cannot run."""
    reason = missing()
    if reason is not None:
        raise TritonUnavailableError(f"Triton kernels cannot run: {reason}")
    return getattr(import_module(f"offload.kernels.gpu.{module}"), name)


class _Compiled:
    """A kernel of Triton as it was compiled for one device."""

    def __init__(self, kernel: Kernel, compiled: Any) -> None:
        self.kernel = kernel  # kept: it is found by its address
        self._run = compiled.run  # first: it loads the function
        self._function, self._metadata = compiled.function, compiled.packed_metadata

    def start(self, programs: int, stream: int, args: Sequence[Any]) -> None:
        """Start the kernel as Triton does, but without profiler hooks. `stream`: CUDA's handle."""
        self._run(
            programs, 1, 1, stream, self._function, self._metadata, None, None, None, *args
        )  # fmt: skip


_compiled: dict[tuple[Any, ...], _Compiled] = {}


def launch(
    kernel: Kernel, programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[Any],
    constants: tuple[int, ...], num_warps: int,
) -> None:  # fmt: skip
    """Queue `programs` programs of `kernel` on the device that `tensors` are on.

    Its arguments are `tensors`, `numbers` (none of which it is specialised on) and `constants`, in
    this order.
    """
    if programs == 0:
        return
    device = tensors[0].device
    kind = accelerator.KINDS.get(device.type)
    if kind is None:
        if not _is_interpreted(kernel):
            raise ValueError(
                f"expected tensors on a CUDA device, got them on {device}; the kernels for host "
                "memory are in kernels.optimizer"
            )
        _launch_anew(kernel, programs, tensors, numbers, constants, num_warps)
        return
    stream = kind.queue(device)
    if stream is None:  # another device is this thread's current one
        with kind.on(device):
            launch(kernel, programs, tensors, numbers, constants, num_warps)
        return
    # all that Triton compiles anew for; hashing the kernel itself takes as long as a lookup
    addresses = [tensor.data_ptr() for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    aligned = [address % 16 == 0 for address in addresses]
    variant = (id(kernel), device.index, constants, num_warps, *dtypes, *aligned)
    compiled = _compiled.get(variant)
    if compiled is not None:
        compiled.start(programs, stream, (*addresses, *numbers, *constants))
        return
    started = _launch_anew(kernel, programs, tensors, numbers, constants, num_warps)
    # for AMD's GPUs it compiles anew for some more
    if not _is_interpreted(kernel) and started.metadata.target.backend != "hip":
        _compiled[variant] = _Compiled(kernel, started)


def _launch_anew(
    kernel: Kernel, programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[Any],
    constants: tuple[int, ...], num_warps: int,
) -> Kernel:  # fmt: skip
    """Have Triton find the compiled kernel, or compile it, and return it."""
    pointers = [bits(tensor) for tensor in tensors]
    # Fused operations are written out; the compiler must not make others of what is left.
    return kernel[(programs,)](
        *pointers, *numbers, *constants, num_warps=num_warps, enable_fp_fusion=False
    )


def numel_of(name: str, tensor: torch.Tensor) -> int:
    """Length of a 1-D tensor; ValueError for any other number of dimensions."""
    if tensor.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {tuple(tensor.shape)}")
    return tensor.shape[0]


def float_of(name: str, tensor: torch.Tensor) -> Float:
    """The format of a tensor of floats; ValueError for any other dtype."""
    kind = _FLOATS.get(tensor.dtype)
    if kind is None:
        expected = ", ".join(map(_short, _FLOATS))
        raise ValueError(f"{name}: expected dtype {expected}, got {_short(tensor.dtype)}")
    return kind


def check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, like: torch.Tensor
) -> None:
    """Raise ValueError unless `tensor` is a contiguous (numel,) of `dtype` where `like` is."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {_short(dtype)}, got {_short(tensor.dtype)}")
    if tensor.shape != (numel,):
        raise ValueError(f"{name}: expected shape ({numel},), got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {tensor.device}")


def fits(tensor: torch.Tensor, numel: int, where: torch.device) -> bool:
    """Whether `check` would accept a tensor whose dtype is known, in a third of its time."""
    return (
        tensor.dim() == 1
        and tensor.numel() == numel
        and tensor.device == where
        and tensor.is_contiguous()
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels take it: 16-bit floats as int16, others unchanged; the same memory."""
    return tensor.view(torch.int16) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _is_interpreted(kernel: Kernel) -> bool:
    import triton

    return not isinstance(kernel, triton.JITFunction)
