"""Where Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter.

Test modules import this one before anything that imports Triton, which reads TRITON_INTERPRET when
it is imported. TRITON_INTERPRET=1 in the environment asks for the interpreter beside a GPU, too.

The interpreter does with NumPy what a GPU would do, on tensors in host memory. One operation needs
help: in versions up to 3.6 at least, its fma is a product and a sum, two roundings where a GPU has
one. So it gets the one of `tests.kernels.reference`, which is what these tests compare with.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from offload.kernels.floats import Array, Float
from tests.kernels import reference

_FLAG = "TRITON_INTERPRET"
_DTYPES = {Float.FP32: torch.float32, Float.BF16: torch.bfloat16, Float.FP16: torch.float16}


@contextmanager
def interpreting() -> Iterator[None]:
    """The flag set, NumPy as quiet as a GPU is about overflow and NaN."""
    before = os.environ.get(_FLAG)
    os.environ[_FLAG] = "1"
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        if before is None:
            del os.environ[_FLAG]
        else:
            os.environ[_FLAG] = before


def _choose() -> str:
    """The device type of test tensors; skips the importing module if nothing can run."""
    wanted = os.environ.get(_FLAG) == "1"
    if torch.cuda.is_available() and not wanted:
        pytest.importorskip("triton", reason="triton is not installed")
        return "cuda"
    if "triton" in sys.modules and not wanted:
        pytest.skip(
            f"triton was imported before {_FLAG}=1 could be set: run these tests first, or set it",
            allow_module_level=True,
        )
    with interpreting():
        pytest.importorskip("triton", reason="triton is not installed")
        _import_kernels()
        _repair_fma()
        _patch_once()
    return "cpu"


def _import_kernels() -> None:
    pass


def _repair_fma() -> None:
    """Make the interpreter's fp32 fma round once. The kernels' fp64 products are exact anyway."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    own = InterpreterBuilder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return own(self, x, y, z)
        return TensorHandle(reference.fma(x.data, y.data, z.data), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def _patch_once() -> None:
    """Leave out what takes most of the interpreter's time: for every call of one jitted function
    from another it lists the members of `triton.language` anew, to patch those that are patched
    since the launch. A module's members are patched and restored together: one tells of all."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    own, samples = interpreter._patch_builtin, dict[Any, str | None]()

    def patch_builtin(module: Any, *args: Any) -> None:
        if module not in samples:
            names = (name for name, member in inspect.getmembers(module) if is_builtin(member))
            samples[module] = next(names, None)
        sample = samples[module]
        if sample is None or is_builtin(getattr(module, sample)):
            own(module, *args)

    interpreter._patch_builtin = patch_builtin


DEVICE = _choose()
MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def launches() -> Iterator[None]:
    """Import this into a test module: launchers see the flag, too."""
    if DEVICE == "cuda":
        yield
    else:
        with interpreting():
            yield


def put(array: Array, kind: Float | None = None) -> torch.Tensor:
    """A tensor of its own on the device; `kind` says what uint16 bits are."""
    if kind is None or kind is Float.FP32:
        return torch.from_numpy(array.copy()).to(DEVICE)
    return torch.from_numpy(array.view(np.int16).copy()).to(DEVICE).view(_DTYPES[kind])


def get(tensor: torch.Tensor) -> Array:
    """A tensor's elements in host memory, 16-bit floats as uint16 bits."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    return tensor.cpu().numpy()


def zeros(numel: int, kind: Float) -> torch.Tensor:
    return torch.zeros(numel, dtype=_DTYPES[kind], device=DEVICE)
