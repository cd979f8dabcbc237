"""A model that is a stage of a pipeline (`torch.distributed.pipelining`).

Each stage trains through an engine of its own, whose data-parallel mesh is that of the stage. To it
a schedule is a loop that runs some forwards before their backwards and takes one step in the end:

    Schedule1F1B, stage 0       F0 F1 B0 F2 B1 F3 B2 B3 | step      gradients: the sum of B0 to B3

Settings that need all gradients of a model (clipping, skipping) would see one stage's gradients and
silently train another model: they are refused at the first forward.
"""

from __future__ import annotations

import sys
from types import FrameType

from offload.tiers.errors import UnsupportedError
from offload.zero.step.stepper import StepRules

_SCHEDULES = "torch.distributed.pipelining.schedules"


def check_schedule(rules: StepRules) -> None:
    """Raise UnsupportedError if the caller, however far up, is a schedule that cannot be followed.
    For the first forward of a model."""
    schedule = _calling_schedule()
    if schedule is None:
        return
    name = type(schedule).__name__
    key = "clip_grad_norm" if rules.clip_grad_norm is not None else "skip_nonfinite"
    if rules.clip_grad_norm is not None or rules.skip_nonfinite:
        raise UnsupportedError(
            f"{key} in a stage of a pipeline ({name}): each stage's engine knows the norm of its "
            f"own gradients only, and the stages would decide differently; leave {key} out"
        )


def _calling_schedule() -> object | None:
    if _SCHEDULES not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # of the schedules' own frames alone: to look at the names of a frame keeps what they stand
        # for alive as long as the frame, also what the caller deletes
        if frame.f_globals.get("__name__") == _SCHEDULES:
            schedule = frame.f_locals.get("self")
            if hasattr(schedule, "scale_grads"):
                return schedule
        frame = frame.f_back
    return None
