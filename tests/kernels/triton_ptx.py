"""Compile Triton kernels for an H100 or H200, which needs no GPU, and print their PTX as JSON.

Run as a program: in a process of its own, so that Triton is not in the interpreter's mode.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload.kernels.triton_convert_kernel import convert_kernel
from offload.kernels.triton_gradient_kernel import gradient_kernel
from offload.kernels.triton_step_kernel import step_kernel

HOPPER = GPUTarget("cuda", 90, 32)
STATES = ("*fp32", "*i16", "*u8")  # by StateFormat
STEP = {
    "RULE": 0, "FLAG": True, "GRAD": 1, "WEIGHT": 1, "MASTER": 1, "STATES": 2, "SIGNED": True,
    "FORMAT": 0,
}  # fmt: skip
GRADIENT = {"ACTION": 0, "DST": 1, "OLD": 1, "SRC": 1, "UNROLL": 32}
CONVERT = {"ACTION": 0, "FORMAT": 1, "SIGNED": True, "UPPER": True, "BLOCK": 1024}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> str:
    """PTX for pointers that are aligned to 16 bytes, as launchers are given them."""
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(types.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    ptx: str = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return ptx


def step(warps: int, **constants: Any) -> str:
    chosen = STEP | constants | {"BLOCK": 1024}
    state = STATES[chosen["FORMAT"]]
    arrays = dict.fromkeys(("grad", "weight", "extra"), "*i16")
    arrays |= dict.fromkeys(("state0", "state1", "state2"), state)
    arrays |= dict.fromkeys(("scales0", "scales1"), "*fp32")
    numbers = {"numel": "i64", "key": "u32", "weight_key": "u32", "first": "u32"}
    scalars = {f"c{place}": "fp32" for place in range(8)}
    return compiled(step_kernel, arrays | numbers | scalars, chosen, warps)


def gradient(dst: str, src: str, **constants: Any) -> str:
    types = {"dst": dst, "old": dst, "src": src, "partials": "*fp64", "numel": "i64"}
    return compiled(gradient_kernel, types, GRADIENT | constants, 1)


def convert(a: str, b: str, c: str, **constants: Any) -> str:
    types = {"a": a, "b": b, "c": c, "numel": "i64", "key": "u32", "first": "u32"}
    return compiled(convert_kernel, types, CONVERT | constants, 8)


def everything() -> dict[str, str]:
    """PTX by the name of a variant."""
    return {
        "adamw": step(8),
        "adam bf16": step(4, FLAG=False, FORMAT=1, MASTER=0),
        "adamw int8": step(4, FORMAT=2),
        "amsgrad": step(8, STATES=3),
        "lion": step(8, RULE=1, STATES=1),
        "adagrad": step(8, RULE=2, STATES=1, SIGNED=False),
        "nesterov": step(8, RULE=3, STATES=1),
        "copy": gradient("*i16", "*i16"),
        "add": gradient("*fp32", "*i16", ACTION=1, DST=0, OLD=0),
        "encode": convert("*fp32", "*i16", "*i16"),
        "encode fp16": convert("*fp32", "*i16", "*i16", FORMAT=2),
        "join": convert("*i16", "*i16", "*fp32", ACTION=3),
        "encode int8": convert("*fp32", "*u8", "*fp32", ACTION=4, FORMAT=2),
        "decode int8": convert("*u8", "*fp32", "*fp32", ACTION=5, FORMAT=2),
    }


if __name__ == "__main__":
    json.dump(everything(), sys.stdout)
