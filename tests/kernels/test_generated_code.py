"""What the compiler made of the kernels: packed code, nothing fused on its own, kept on disk."""

import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from offload.kernels import adam_loop as adam_module
from offload.kernels import jit
from offload.kernels.adam import Float, Master
from offload.kernels.adam_loop import adam_loop, variant_code
from offload.kernels.gradient_loop import Action, gradient_loop
from offload.kernels.gradient_loop import variant_code as gradient_code

SPLIT = variant_code(Float.BF16, Float.BF16, Master.SPLIT, True, False)
WHOLE = variant_code(Float.FP32, Float.FP32, Master.NONE, True, False)
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instructions")


def fresh(kernel: jit.Kernel) -> jit.Kernel:
    """Compiled again: Numba cannot show what it read from its cache."""
    return jit.compiled(kernel.py_func, cache=False)  # type: ignore[attr-defined]


@cache
def compiled_adam(code: int) -> jit.Kernel:
    kernel = fresh(adam_loop(code))
    state, half = np.zeros(1, np.float32), np.zeros(1, np.uint16)
    constants = np.zeros(8, np.float32)
    if code == SPLIT:
        kernel(half, half, half.view(np.int16), state, state, state, constants, 0, 0)
    else:
        kernel(state, state, state, state, state, state, constants, 0, 0)
    return kernel


def assembly(kernel: jit.Kernel, cpu: str) -> str:
    """The kernel's code for another CPU than this one."""
    (ir,) = kernel.inspect_llvm().values()
    target = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, opt=3)
    text: str = target.emit_assembly(llvm.parse_assembly(ir))
    return text


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


@x86_only
@pytest.mark.parametrize("code", [WHOLE, SPLIT])
@pytest.mark.parametrize(
    ("cpu", "register", "vectors"),
    [("haswell", "ymm", 2), ("skylake-avx512", "zmm", 1), ("znver4", "zmm", 1)],
)
def test_hot_loop_is_packed(code: int, cpu: str, register: str, vectors: int) -> None:
    text = assembly(compiled_adam(code), cpu)
    assert count(rf"vsqrtps.*{register}", text) >= vectors
    assert count(rf"vdivps.*{register}", text) >= vectors
    assert count(rf"vfn?madd\d+ps.*{register}", text) >= 5 * vectors
    assert not count(r"vrsqrt|vrcp|call.*fma", text)  # no estimates, no fma in software


@x86_only
def test_this_cpu_runs_packed_code() -> None:
    if not llvm.get_host_cpu_features().get("fma"):
        pytest.skip("a CPU without fused multiply-add")
    (text,) = compiled_adam(WHOLE).inspect_asm().values()
    assert count(r"vsqrtps.*[yz]mm", text) >= 1
    assert count(r"vfn?madd\d+ps.*[yz]mm", text) >= 5


@pytest.mark.parametrize("code", [WHOLE, SPLIT])
def test_no_operation_may_be_fused_or_reordered(code: int) -> None:
    (ir,) = compiled_adam(code).inspect_llvm().values()
    assert count(r"llvm\.fma\.v\d+f32\(", ir) >= 5
    assert not count(r"\bf(add|sub|mul|div)\b.*\b(fast|contract|reassoc|afn|arcp)\b", ir)
    assert not count(r"llvm\.fmuladd", ir)
    # An addition that is not part of an fma is one that some compiler could make part of one.
    assert not count(r"= f(add|sub) ", ir)


@pytest.mark.parametrize("numel", [127, 128, 1000])
def test_the_bursts_of_another_cpu_give_the_same_bits(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many vectors go side by side is chosen by the registers there are."""
    rng = np.random.default_rng(numel)
    constants = np.array([1, 0.1, 0.999, 0.001, 9, 1e-8, 0.99, -1e-3], np.float32)
    seen = set()
    for burst in (16, 32, 128):
        monkeypatch.setattr(adam_module, "BURST", burst)
        kernel = fresh(adam_loop(SPLIT))
        state = rng.bit_generator.state
        weight, low, grad = (rng.integers(0, 1 << 16, numel, dtype=np.uint16) for _ in range(3))
        moments = [rng.random(numel, np.float32) for _ in range(2)]
        rng.bit_generator.state = state
        weight >>= 2  # finite
        grad >>= 2
        arrays = (weight, low.view(np.int16), *moments)
        kernel(grad, *arrays, moments[1], constants, 0, numel)
        seen.add(b"".join(array.tobytes() for array in arrays))
    assert len(seen) == 1


@x86_only
def test_norm_is_packed() -> None:
    copy = gradient_code(Action.COPY, Float.BF16, Float.BF16, Float.BF16)
    kernel = fresh(gradient_loop(copy))
    half = np.zeros(1, np.uint16)
    kernel(half, half, half, np.zeros(1), 0, 1)
    text = assembly(kernel, "haswell")
    assert count(r"vfmadd\d+pd.*ymm", text) >= 8


PROGRAM = """
import numpy as np
from offload.kernels.adam import AdamScalars, Float, adam_step
from offload.kernels.adam_loop import Master, adam_loop, variant_code
grad, weight, exp_avg, exp_avg_sq = np.ones((4, 9), np.float32)
scalars = AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, 1)
adam_step(grad, weight, exp_avg, exp_avg_sq, scalars,
          grad_float=Float.FP32, weight_float=Float.FP32)
stats = adam_loop(variant_code(Float.FP32, Float.FP32, Master.NONE, True, False)).stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def test_another_process_finds_the_compiled_code_on_disk(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    hits_and_misses = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment, capture_output=True, text=True, check=True, timeout=120,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert hits_and_misses == [["0", "1"], ["1", "0"]]


def test_without_a_cache_folder_kernels_still_compile() -> None:
    scope: dict[str, jit.Kernel] = {}
    exec("def double(x): return 2 * x", scope)  # from no file: Numba has nowhere to cache it
    assert jit.compiled(scope["double"])(21) == 42


def test_a_plan_keeps_its_variant_and_its_digest() -> None:
    plan = jit.plan(0x7FF, jit.digest(jit.__file__))
    assert plan < 1 << 63
    assert plan & 0xFFF == 0x7FF
