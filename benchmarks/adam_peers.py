"""Other CPU AdamWs: PyTorch's fused one and DeepSpeed's, alone and with the passes around them.

Alone they take fp32 gradients and update fp32 weights. In mixed-precision training that is not
all: the 16-bit gradient is converted, unscaled, clipped, and the new weight is converted back, each
in a pass of its own over memory. `whole` rows include those. The norm that clipping needs is left
out everywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.trained import prepare
from offload.bench.adam import passing
from offload.bench.contenders import INSTALL_BENCH
from offload.bench.record import Kind, Record, Row, Target
from offload.bench.rounds import Say, Timed
from offload.planning.machine.optimizer_variants import (
    GRAD16,
    GRAD32,
    PLAIN,
    SPLIT,
    WEIGHT16,
    WEIGHT32,
    Arrays,
    Stream,
)

TORCH, TORCH_WHOLE = "torch fused, fp32", "torch fused, whole path"
DEEPSPEED, DEEPSPEED_WHOLE = "DeepSpeedCPUAdam, fp32", "DeepSpeedCPUAdam, whole path"
EXP_AVG, EXP_AVG_SQ = PLAIN.record
ALONE_TRAFFIC = 28.0
# gradient up 2 + 4, a multiplication in place 4 + 4, Adam 28, weight down 4 + 2
WHOLE_TRAFFIC = {1: 48.0, 2: 56.0}  # by multiplications

Step = Callable[[], None]

_HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def systems(arrays: Arrays, say: Say) -> tuple[list[Timed], list[Row]]:
    """Both optimizers, each alone and with the passes around it; rows for those not installed."""
    torch_alone = alone(torch_optimizer, arrays, torch.tensor(0.0))
    found = [
        _alone(TORCH, arrays, torch_alone),
        _whole(TORCH_WHOLE, arrays, torch_alone, multiplications=2),
    ]
    reason = INSTALL_BENCH
    if importlib.util.find_spec("deepspeed") is not None:
        say("loading DeepSpeed's CPU Adam; compiling it takes a minute the first time")
        try:
            theirs = alone(deepspeed_optimizer, arrays, 0)
        except Exception as error:  # noqa: BLE001  a foreign library's failure ends no bench
            lines = str(error).strip().splitlines() or [""]
            reason = f"cannot be used: {type(error).__name__}: {lines[-1][:160]}"
        else:
            both = _whole(DEEPSPEED_WHOLE, arrays, theirs, multiplications=1)
            return [*found, _alone(DEEPSPEED, arrays, theirs), both], []
    return found, [Row(name, Kind.PEER, note=reason) for name in (DEEPSPEED, DEEPSPEED_WHOLE)]


def compare(record: Record) -> None:
    """Add the ratios to the record, and what `whole path` means."""
    speed = "parameters_per_s"
    record.compare(SPLIT.name, DEEPSPEED_WHOLE, speed, Target(2.0))
    record.compare(SPLIT.name, TORCH_WHOLE, speed, Target(1.8))
    record.compare(PLAIN.name, DEEPSPEED, speed, Target(0.98))
    record.compare(PLAIN.name, TORCH, speed)
    record.notes.append(
        "whole path: bf16 gradient to fp32, unscale and clip (torch: two passes, DeepSpeed: one), "
        "Adam, fp32 master to bf16; ours does all of it in its one pass"
    )


def _alone(name: str, arrays: Arrays, step: Step) -> Timed:
    return passing(name, Kind.PEER, ALONE_TRAFFIC, arrays, step)


def _whole(name: str, arrays: Arrays, step: Step, *, multiplications: int) -> Timed:
    around = whole(step, arrays, multiplications=multiplications)
    return passing(name, Kind.PEER, WHOLE_TRAFFIC[multiplications], arrays, around)


def torch_optimizer(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    """torch.optim.AdamW in its fused form."""
    return torch.optim.AdamW([param], fused=True, **_HYPER)  # type: ignore[arg-type]


def deepspeed_optimizer(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam; compiles it when called for the first time on a machine (a minute)."""
    prepare("cpu")
    adam: Any = importlib.import_module("deepspeed.ops.adam")
    optimizer: torch.optim.Optimizer = adam.DeepSpeedCPUAdam([param], adamw_mode=True, **_HYPER)
    return optimizer


def alone(
    make: Callable[[torch.nn.Parameter], torch.optim.Optimizer], arrays: Arrays, first_step: Any
) -> Step:
    """The optimizer's step, fp32 in and out, over the arrays that all systems share.

    `first_step` is 0 as this optimizer keeps its step count: a tensor, or a number.
    """
    param = torch.nn.Parameter(_fp32(arrays, WEIGHT32))
    param.grad = _fp32(arrays, GRAD32)
    optimizer = make(param)
    optimizer.state[param] = {
        "step": first_step,
        "exp_avg": _fp32(arrays, EXP_AVG),
        "exp_avg_sq": _fp32(arrays, EXP_AVG_SQ),
    }
    step: Step = optimizer.step
    return step


def whole(update: Step, arrays: Arrays, *, multiplications: int) -> Step:
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
    return torch.from_numpy(arrays[stream])


def _bf16(arrays: Arrays, stream: Stream) -> torch.Tensor:
    return torch.from_numpy(arrays[stream]).view(torch.bfloat16)
