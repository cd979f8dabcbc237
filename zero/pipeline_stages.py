"""A model that is a stage of a pipeline (`torch.distributed.pipelining`).

Each stage trains through an engine of its own, whose data-parallel mesh is that of the stage. To it
a schedule is a loop that runs some forwards before their backwards and takes one step in the end:

    Schedule1F1B, stage 0       F0 F1 B0 F2 B1 F3 B2 B3 | step      gradients: the sum of B0 to B3

A schedule that scales gradients would divide `param.grad` after that, and find none: gradients go
into the engine's accumulators as they come.
"""

from __future__ import annotations

import sys

from offload.tiers.errors import UnsupportedError

_SCHEDULES = "torch.distributed.pipelining.schedules"


def refuse_scaling_schedule() -> None:
    """UnsupportedError if the caller, however far up, is a schedule that is going to scale
    gradients: nothing later would tell. For the first forward of a model."""
    if _SCHEDULES not in sys.modules:
        return
    frame = sys._getframe(1)
    while frame is not None:
        schedule = frame.f_locals.get("self")
        if type(schedule).__module__ == _SCHEDULES and getattr(schedule, "scale_grads", False):
            raise UnsupportedError(
                f"{type(schedule).__name__} would divide gradients by the number of micro-batches "
                "where the engine does not keep them (param.grad); make it with scale_grads=False, "
                "and divide the loss by that number in its loss_fn"
            )
        frame = frame.f_back  # type: ignore[assignment]
