"""Compile Triton kernels down to machine code for a GPU, which needs none, and print JSON:
for each variant its assembly and the bytes of memory that stand in for registers.

Run as a program with a target's name: in a process of its own, so that Triton is not in the
interpreter's mode.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload.kernels.gpu.triton_dequantize_kernel import dequantize_kernel
from offload.kernels.gpu.triton_gradient_kernel import gradient_kernel
from offload.kernels.gpu.triton_step_kernel import step_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "sm_100": GPUTarget("cuda", 100, 32),  # B200
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
STATES = ("*fp32", "*i16", "*u8")  # by StateFormat
STEP = {
    "RULE": 0, "FLAG": True, "GRAD": 1, "WEIGHT": 1, "MASTER": 1, "STATES": 2, "SIGNED": True,
    "FORMAT": 0,
}  # fmt: skip
GRADIENT = {"ACTION": 0, "DST": 1, "SRC": 1, "UNROLL": 32}
QUANTIZED = {"TYPE": 1, "FLOAT": 1, "GROUP": 64, "BLOCK": 2048}


@dataclass
class Compiler:
    """Compiles for one target. `max_registers`: of a thread, fewer than it would take."""

    target: GPUTarget
    max_registers: int | None = None

    def compile(
        self, kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int
    ) -> dict[str, Any]:
        """For pointers that are aligned to 16 bytes, as launchers are given them."""
        signature = types | dict.fromkeys(constants, "constexpr")
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, kind in enumerate(types.values())
            if kind.startswith("*")
        }
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        made = triton.compile(source, target=self.target, options=options).asm
        if self.target.backend == "hip":
            return {"assembly": made["amdgcn"], "spilled": spilled_amd(made["amdgcn"])}
        return {"assembly": made["ptx"], "spilled": spilled_nvidia(made["cubin"])}

    def step(self, warps: int, **constants: Any) -> dict[str, Any]:
        chosen = STEP | constants | {"BLOCK": 1024}
        state = STATES[chosen["FORMAT"]]
        arrays = dict.fromkeys(("grad", "weight", "extra"), "*i16")
        arrays |= dict.fromkeys(("state0", "state1", "state2"), state)
        arrays |= dict.fromkeys(("scales0", "scales1"), "*fp32")
        numbers = {"numel": "i64", "key": "u32", "weight_key": "u32", "first": "u32"}
        scalars = {f"c{place}": "fp32" for place in range(8)}
        return self.compile(step_kernel, arrays | numbers | scalars, chosen, warps)

    def gradient(self, dst: str, src: str, **constants: Any) -> dict[str, Any]:
        types = {"dst": dst, "src": src, "partials": "*fp64", "numel": "i64"}
        return self.compile(gradient_kernel, types, GRADIENT | constants, 1)

    def dequantize(self, **constants: Any) -> dict[str, Any]:
        types = {"values": "*i16", "words": "*i32", "codes": "*u8", "groups": "i64"}
        return self.compile(dequantize_kernel, types, QUANTIZED | constants, 8)

    def everything(self) -> dict[str, dict[str, Any]]:
        return {
            "adamw": self.step(8),
            "adam bf16": self.step(4, FLAG=False, FORMAT=1, MASTER=0),
            "adamw int8": self.step(4, FORMAT=2),
            "amsgrad": self.step(8, STATES=3),
            "lion": self.step(8, RULE=1, STATES=1),
            "adagrad": self.step(8, RULE=2, STATES=1, SIGNED=False),
            "nesterov": self.step(8, RULE=3, STATES=1),
            "copy": self.gradient("*i16", "*i16"),
            "add": self.gradient("*fp32", "*i16", ACTION=1, DST=0),
            "weights of int4": self.dequantize(),
            "weights of nf4": self.dequantize(TYPE=2),
        }


def spilled_nvidia(cubin: bytes) -> int:
    """Bytes of local memory that a thread has for what its registers do not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    (used,) = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", said)
    return sum(map(int, used))


def spilled_amd(assembly: str) -> int:
    """Bytes of scratch memory of a thread. Scalar registers are spilled into vector registers."""
    (scratch,) = re.findall(r"^\s*\.private_segment_fixed_size: (\d+)", assembly, re.M)
    (vectors,) = re.findall(r"^\s*\.vgpr_spill_count: +(\d+)", assembly, re.M)
    return int(scratch) + int(vectors)


if __name__ == "__main__":
    programs = Compiler(TARGETS[sys.argv[1]]).everything()
    if sys.argv[1] == "sm_90":
        programs["too few registers"] = Compiler(TARGETS["sm_90"], 24).step(8)
    json.dump(programs, sys.stdout)
