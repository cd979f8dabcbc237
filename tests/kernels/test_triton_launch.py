"""Launchers import Triton when it is needed, and say what is missing where it cannot run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.kernels.gpu import triton_launch
from offload.tiers import accelerator
from tests.kernels import triton_device
from tests.kernels.triton_device import DEVICE, launches

__all__ = ["launches"]
pytestmark = triton_device.MARKS

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
import torch
import offload.kernels.gpu.triton_gradients, offload.kernels.gpu.triton_optimizer
from offload.kernels.gpu.triton_gradients import copy_gradient
from offload.kernels.gpu.triton_launch import TritonUnavailableError
assert "triton" not in sys.modules, "imported before it was needed"
"""
CALL = """
try:
    copy_gradient(torch.ones(3), torch.ones(3), torch.zeros(1, dtype=torch.float64))
except TritonUnavailableError as error:
    print(error)
"""


def run(program: str) -> str:
    """What a fresh process prints that has no interpreter and sees no GPU."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_triton_the_error_says_so() -> None:
    said = run(IMPORTS + "sys.modules['triton'] = None" + CALL)
    assert "triton is not installed: pip install 'offload[gpu]'" in said


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes tensors in host memory")
def test_host_memory_is_refused_on_a_gpu() -> None:
    from offload.kernels.gpu.triton_gradients import copy_gradient

    with pytest.raises(ValueError, match="expected tensors on a CUDA device, got them on cpu"):
        copy_gradient(torch.ones(3), torch.ones(3), torch.zeros(1, dtype=torch.float64))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_scalars_and_lengths_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from tests.kernels.step_cases import NOISE, RULES
    from tests.kernels.triton_cases import case

    compiled: list[object] = []

    def note(**what: object) -> None:
        compiled.append(what["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    case(RULES["adamw"], 1024).on_device()
    compiled.clear()
    for numel in (1, 16, 1025, 3000):
        made = case(RULES["adamw"], numel)
        made.noise = NOISE.at(numel)
        made.on_device()
    case(RULES["lion"], 1024).on_device()
    assert len(compiled) <= 1, compiled  # Lion's, if no other test has needed it


class _Call:
    """A kernel of Triton, and what it has compiled: both note with what they are called."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, backend: str) -> None:
        self.anew: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend=backend))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, num_warps: int, enable_fp_fusion: bool) -> Any:
            assert not enable_fp_fusion
            self.anew.append((grid, *args, num_warps))
            return self

        return call

    def run(self, *args: Any) -> None:
        self.again.append(args)


@dataclass
class _Pointer:
    address: int
    dtype: torch.dtype = torch.float32
    index: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def data_ptr(self) -> int:
        return self.address


class _Current:
    index = 0

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        before, self.index = self.index, device.index
        yield
        self.index = before


def launched(kernel: Any, *tensors: Any, number: int = 5, num_warps: int = 1, **more: Any) -> None:
    triton_launch.launch(kernel, 3, tensors, (number,), tuple(more.values()), num_warps)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = _Current()
    kind = SimpleNamespace(
        on=current.entered, queue=lambda device: 99 if device.index == current.index else None
    )
    monkeypatch.setitem(accelerator.KINDS, "cuda", kind)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(triton_launch, "_is_interpreted", lambda kernel: False)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_compiled_kernel_is_used_again_for_other_addresses_and_numbers() -> None:
    kernel = _Call("cuda")
    first, second = _Pointer(32), _Pointer(48)
    launched(kernel, first, second, FLAG=7)
    launched(kernel, second, first, number=6, FLAG=7)
    assert kernel.anew == [((3,), first, second, 5, 7, 1)]
    assert kernel.again == [(3, 1, 1, 99, "function", "metadata", None, None, None, 48, 32, 6, 7)]
