"""The learning rate as a pure function of the step: nothing to save, exact on resume."""

from __future__ import annotations

import math

from offload.config.training import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Factor on the learning rate at `step` (0-based) of `steps`: warm-up, then the shape."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.type == "constant":
        return 1.0
    done = (step - schedule.warmup_steps) / max(1, steps - 1 - schedule.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return schedule.final + (1 - schedule.final) * cosine
