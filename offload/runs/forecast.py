"""Predicts a run before it is started: the plan of `offload train`, and its memory and time.

The loop knows its batch, so all open settings are chosen by the predicted step time, and memory is
predicted with activations and libraries.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch import nn

from offload.config import OffloadConfig
from offload.memory.tier_manager import compute_device, nvme_paths, this_machine
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.planner import RunPlan, chosen_config, plan_run
from offload.planning.choice.solver import RunFacts, Solution
from offload.planning.machine.baseline import known_baseline
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.speeds import NOMINAL, Speeds
from offload.planning.plan.chunk_and_prefetch import WORTH_MEASURING_NBYTES
from offload.planning.plan.estimate import Workload
from offload.planning.plan.sizes import ITEMSIZE, planned_shape
from offload.runs.metrics import Prediction
from offload.tiers import accelerator
from offload.tiers.errors import UnsupportedError
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters
from offload.zero.ranks.sharding import ALONE, Sharding

_log = logging.getLogger("offload")


@dataclass(frozen=True)
class Forecast:
    """A run's plan. If the machine's `speeds` are None, no time is predicted."""

    planned: RunPlan
    speeds: Speeds | None

    @property
    def solution(self) -> Solution:
        return self.planned.solution

    @property
    def config(self) -> OffloadConfig:
        """The configuration with all chosen values written into it."""
        best = self.planned.best
        return chosen_config(best.config, best.plan)

    @property
    def timed(self) -> bool:
        """Whether times can be predicted; the network between ranks is not measured."""
        return self.speeds is not None and self.planned.hardware.sharding.world_size == 1

    def prediction(self) -> Prediction:
        """The peaks and seconds for prediction.json."""
        memory = self.planned.memory
        tiers = {str(tier): nbytes for tier, nbytes in memory.ledger_peaks.items()}
        rss = memory.places[Tier.HOST].peak_nbytes
        bounds = tuple(sorted(map(str, memory.bounds)))
        step = self.planned.best.step if self.timed else None
        return Prediction(tiers, rss, step.seconds if step is not None else None, bounds)


def forecast(
    config: OffloadConfig, model: nn.Module, workload: Workload, sharding: Sharding = ALONE,
    here: int | None = None,
) -> Forecast | None:  # fmt: skip
    """Plan a run that knows its workload. `config` is as given, with `optimizer.in_backward` as the
    loop sets it; `model` is on the meta device.

    Returns None, with one warning, if the model's passes cannot be traced. Speeds that were never
    measured here are measured if the model is large enough. `here` is the number of ranks on this
    machine, by default the actual one.
    """
    experts = config.splits_experts(sharding.world_size)
    grouping = group_parameters(model, config.groups.blocks, experts=experts)
    shape = planned_shape(config, grouping.shape())
    device = compute_device(config)
    hardware = this_machine(config.nvme, device, sharding, here)
    speeds = _speeds(config, shape)
    gpu = accelerator.is_accelerator(device)
    baseline = known_baseline(config.precision, gpu=gpu).that_plans()
    known: dict[object, ActivationFacts] = {}  # by the settings that a pass depends on

    def facts(config: OffloadConfig) -> ActivationFacts:
        key = config.placement.activations.checkpoint
        if key not in known:
            known[key] = trace_activations(model, config, workload, device=device.type)
        return known[key]

    run = RunFacts(workload, speeds or replace(NOMINAL, gpu=gpu), facts, baseline)
    try:
        planned = plan_run(config, shape, hardware, run)
    except UnsupportedError as error:
        _log.warning("no prediction for this run: %s", error)
        return None
    return Forecast(planned, speeds)


def workload_of(config: OffloadConfig) -> Workload:
    """The workload of one step of `offload train`."""
    train = config.train
    return Workload(train.batch, train.sequence, config.gradient_accumulation_steps)


def _speeds(config: OffloadConfig, model: ModelShape) -> Speeds | None:
    paths = nvme_paths(config.nvme)
    known = known_speeds(paths)
    worth_it = model.numel * ITEMSIZE[config.precision] >= WORTH_MEASURING_NBYTES
    if known is not None or not worth_it:
        return known
    _log.warning("measuring this machine's speed, once: some seconds")
    return machine_speeds(paths)
