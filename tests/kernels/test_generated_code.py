"""What the compiler made of the kernels: packed code, nothing fused on its own, kept on disk."""

import platform
import re
from functools import cache

import numpy as np
import pytest

from offload.kernels.cpu import jit
from offload.kernels.cpu import optimizer as optimizer_module
from offload.kernels.cpu import step_loop as step_module
from offload.kernels.cpu.step_loop import ARGUMENTS, step_loop
from offload.kernels.floats import Float
from offload.kernels.rules import Rule, StateFormat
from offload.kernels.variants import Master, variant_code
from tests.kernels import reference
from tests.kernels.step_cases import RULES, Formats, Stored, calm


def adam_code(states: StateFormat = StateFormat.FP32, master: Master = Master.SPLIT) -> int:
    kind = Float.BF16
    return variant_code(Rule.ADAM, kind, kind, master, states, 2, flag=True)


SPLIT = adam_code()
WHOLE = variant_code(Rule.ADAM, Float.FP32, Float.FP32, Master.NONE, StateFormat.FP32, 2, flag=True)
LOW_BIT = [
    adam_code(StateFormat.BF16),
    adam_code(StateFormat.INT8),
    adam_code(StateFormat.FP32, Master.NONE),
    adam_code(StateFormat.INT8, Master.NONE),
]
OTHER_RULES = [
    variant_code(rule, Float.BF16, Float.BF16, Master.SPLIT, states, 1)
    for rule in (Rule.LION, Rule.ADAGRAD, Rule.SGD)
    for states in StateFormat
]
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instructions")


def fresh(kernel: jit.Kernel) -> jit.Kernel:
    """Compiled again: Numba cannot show what it read from its cache."""
    return jit.compiled(kernel.py_func, cache=False)  # type: ignore[attr-defined]


@cache
def compiled_step(code: int) -> jit.Kernel:
    kernel = fresh(step_loop(code))
    kernel(np.zeros(ARGUMENTS, np.int64), np.zeros(8, np.float32), 0, 0)
    return kernel


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


@pytest.mark.sample(3)
@pytest.mark.parametrize("code", [WHOLE, SPLIT, *LOW_BIT, *OTHER_RULES])
def test_no_operation_may_be_fused_or_reordered(code: int) -> None:
    (ir,) = compiled_step(code).inspect_llvm().values()
    assert count(r"llvm\.fma\.v\d+f32\(", ir) >= 2
    assert not count(r"\bf(add|sub|mul|div)\b.*\b(fast|contract|reassoc|afn|arcp)\b", ir)
    assert not count(r"llvm\.fmuladd", ir)
    # An addition to a product is one that some compiler could make an fma.
    assert not [line for line in _additions(ir) if "fmul" in line]


def _additions(ir: str) -> list[str]:
    """The additions and subtractions of LLVM IR, each followed by what makes its operands."""
    sources = dict(re.findall(r"^\s*(%[\w.]+) = (.*)$", ir, re.MULTILINE))
    lines = re.findall(r"= (f(?:add|sub) .*)$", ir, re.MULTILINE)
    return [
        "; ".join([line, *(sources[operand] for operand in re.findall(r"%[\w.]+", line))])
        for line in lines
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("burst", [16, 128])
@pytest.mark.parametrize("states", StateFormat)
def test_the_vectors_of_another_cpu_give_the_same_bits(
    states: StateFormat, burst: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of vectors in a round is chosen by the registers there are."""
    monkeypatch.setattr(step_module, "BURST", burst)
    compiled = cache(lambda code: fresh(step_loop(code)))  # once for all sizes
    monkeypatch.setattr(optimizer_module, "step_loop", compiled)
    for numel in (20, 40, 127, 128, 1000):
        stored = Stored.draw(RULES["adamw"], Formats(states=states), numel, calm(1))
        grad = reference.encode(calm(9)(numel), Float.BF16)
        expected = stored.copy()
        expected.reference_step(grad, RULES["adamw"])
        stored.step(grad, RULES["adamw"])
        stored.assert_same(expected)
