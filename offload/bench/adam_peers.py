"""Other CPU AdamWs: PyTorch's fused one and DeepSpeed's, alone and with the passes around them.

Alone they take fp32 gradients and update fp32 weights. In mixed-precision training that is not
all: the 16-bit gradient is converted, unscaled, clipped, and the new weight is converted back, each
in a pass of its own over memory. `whole` rows include those. The norm that clipping needs is left
out everywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.bench.adam_ours import GRAD16, GRAD32, WEIGHT16, WEIGHT32, filled
from offload.bench.arrays import Arrays, Stream, tensor_of

INSTALL_DEEPSPEED = "not installed: pip install 'offload[bench]'"
EXP_AVG, EXP_AVG_SQ = Stream("exp_avg fp32", "float32"), Stream("exp_avg_sq fp32", "float32")
STREAMS = (GRAD32, WEIGHT32, EXP_AVG, EXP_AVG_SQ)
WHOLE_STREAMS = (*STREAMS, GRAD16, WEIGHT16)
ALONE_TRAFFIC = 28.0
# gradient up 2 + 4, a multiplication in place 4 + 4, Adam 28, weight down 4 + 2
WHOLE_TRAFFIC = {"one multiplication": 48.0, "two multiplications": 56.0}

_HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def has_deepspeed() -> bool:
    """Whether it could be imported; does not."""
    return importlib.util.find_spec("deepspeed") is not None


def torch_optimizer(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    """torch.optim.AdamW in its fused form."""
    return torch.optim.AdamW([param], fused=True, **_HYPER)  # type: ignore[arg-type]


def deepspeed_optimizer(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam; compiles it when called for the first time on a machine (a minute)."""
    prepare_deepspeed()
    adam: Any = importlib.import_module("deepspeed.ops.adam")
    optimizer: torch.optim.Optimizer = adam.DeepSpeedCPUAdam([param], adamw_mode=True, **_HYPER)
    return optimizer


def prepare_deepspeed() -> None:
    """What it reads from the environment when it is imported: the device, where ninja is."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((folder, os.environ["PATH"]))


def alone(
    make: Callable[[torch.nn.Parameter], torch.optim.Optimizer], arrays: Arrays, first_step: Any
) -> Callable[[], None]:
    """The optimizer's step, fp32 in and out, over the arrays that all systems share.

    `first_step` is 0 as this optimizer keeps its step count: a tensor, or a number.
    """
    param = torch.nn.Parameter(tensor_of(filled(arrays, WEIGHT32), torch.float32))
    param.grad = tensor_of(filled(arrays, GRAD32), torch.float32)
    optimizer = make(param)
    optimizer.state[param] = {
        "step": first_step,
        "exp_avg": tensor_of(filled(arrays, EXP_AVG), torch.float32),
        "exp_avg_sq": tensor_of(filled(arrays, EXP_AVG_SQ), torch.float32),
    }
    step: Callable[[], None] = optimizer.step
    return step


def whole(
    update: Callable[[], None], arrays: Arrays, *, multiplications: int
) -> Callable[[], None]:
    """`update` with the passes around it: up, unscale, clip, ..., down.

    Two multiplications where unscaling and clipping are two calls, as with torch's GradScaler and
    `clip_grad_norm_`; one where they are combined, as DeepSpeed does.
    """
    grad32, weight32 = _fp32(arrays, GRAD32), _fp32(arrays, WEIGHT32)
    grad16, weight16 = _bf16(arrays, GRAD16), _bf16(arrays, WEIGHT16)
    factor = 0.5 ** (1 / multiplications)

    @torch.no_grad()
    def step() -> None:
        grad32.copy_(grad16)
        for _ in range(multiplications):
            grad32.mul_(factor)
        update()
        weight16.copy_(weight32)

    return step


def _fp32(arrays: Arrays, stream: Stream) -> torch.Tensor:
    return tensor_of(filled(arrays, stream), torch.float32)


def _bf16(arrays: Arrays, stream: Stream) -> torch.Tensor:
    return tensor_of(filled(arrays, stream), torch.bfloat16)
