"""What Triton makes of the kernels: machine code for every GPU, without memory in the place of
registers; for an H200 the operations written, and no others.

Triton compiles for a GPU without one, so this runs everywhere.
"""

import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATHS = 2  # every kernel is there twice: for whole blocks, and with masks for the last one


Compiled = dict[str, dict[str, Any]]
SQUEEZED = "too few registers"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    """The variants of `triton_compiled` for a target, compiled anew."""
    pytest.importorskip("triton", reason="triton is not installed")
    folder = tmp_path_factory.mktemp("triton")
    return functools.cache(lambda target: compile_for(target, folder))


def compile_for(target: str, folder: Path) -> Compiled:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH", "")])
    )
    program = [sys.executable, "-m", "tests.kernels.triton_compiled", target]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def ptx(compiled: Callable[[str], Compiled]) -> dict[str, str]:
    programs = compiled("sm_90")
    return {name: each["assembly"] for name, each in programs.items() if name != SQUEEZED}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_is_machine_code_that_spills_no_register(
    compiled: Callable[[str], Compiled], target: str, long: bool
) -> None:
    if target != "sm_90" and not long:
        pytest.skip("another generation, or another maker's: with --long")
    spilled = {name: each["spilled"] for name, each in compiled(target).items()}
    assert spilled.pop(SQUEEZED, 1) > 0  # a spill is seen
    assert len(spilled) == 11
    assert {name: nbytes for name, nbytes in spilled.items() if nbytes} == {}


def instructions(ptx: str) -> list[str]:
    return re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[\w:]+)*)\s+[^;]*;", ptx, re.M)


def count(ptx: str) -> Counter[str]:
    return Counter(instructions(ptx))


@pytest.mark.parametrize(
    ("variant", "elements", "expected"),
    [  # elements per thread; operations per element
        ("adamw", 4, {"fma": 5, "mul": 4, "div": 1, "sqrt": 1, "add": 0}),
        ("adam bf16", 8, {"fma": 6, "mul": 3, "div": 1, "sqrt": 1, "add": 0}),
        ("adamw int8", 8, {"fma": 5, "mul": 4, "div": 1, "sqrt": 1, "add": 2}),
        ("amsgrad", 4, {"fma": 5, "mul": 4, "div": 1, "sqrt": 1, "add": 0}),
        ("lion", 4, {"fma": 5, "mul": 2, "div": 0, "sqrt": 0, "add": 0}),
        ("adagrad", 4, {"fma": 3, "mul": 1, "div": 1, "sqrt": 1, "add": 1}),
        ("nesterov", 4, {"fma": 4, "mul": 2, "div": 0, "sqrt": 0, "add": 0}),
    ],
)
def test_a_step_has_the_operations_of_its_rule(
    ptx: dict[str, str], variant: str, elements: int, expected: dict[str, int]
) -> None:
    counts = count(ptx[variant])
    for operation, per_element in expected.items():
        assert counts[f"{operation}.rn.f32"] == per_element * elements * PATHS, operation


def test_nothing_is_approximate_or_flushed_or_left_to_be_fused(ptx: dict[str, str]) -> None:
    for variant, code in ptx.items():
        for name in count(code):
            assert not re.search(r"ftz|approx|full", name), (variant, name)
            assert not re.fullmatch(r"(add|sub|mul|fma|mad)\.f(32|64)", name), (variant, name)
