"""What a run will take, before it is started: the plan of `offload train`, and its prediction.

The loop knows its batch: everything that the configuration leaves open is chosen by the predicted
step time, and memory is predicted with activations and libraries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from offload.config import OffloadConfig
from offload.homes import compute_device, nvme_paths, this_machine
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.advice import Situation, advise, corrected
from offload.planning.choice.planner import chosen_config
from offload.planning.choice.run_check import LinkPrediction, Prediction
from offload.planning.choice.solver import RunFacts, Solution, solve
from offload.planning.machine.baseline import known_baseline
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.speeds import NOMINAL, Speeds
from offload.planning.plan.estimate import Change, MemoryEstimate
from offload.planning.plan.plan import Hardware
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.plan.tuning import WORTH_MEASURING_NBYTES
from offload.planning.plan.workload import Workload
from offload.planning.step.memory import PlannedMemory
from offload.tiers import accelerator
from offload.tiers.errors import UnsupportedError
from offload.tiers.tier import Tier
from offload.zero.discovery import discover
from offload.zero.model_shape import ModelShape
from offload.zero.sharding import ALONE, Sharding

_log = logging.getLogger("offload")

FactsOf = Callable[[OffloadConfig], ActivationFacts]


@dataclass(frozen=True)
class Forecast:
    """A run's plan. `speeds` None: the machine's are not known, so no time is predicted."""

    given: OffloadConfig
    model: ModelShape
    hardware: Hardware
    known: RunFacts
    speeds: Speeds | None
    solution: Solution

    @property
    def config(self) -> OffloadConfig:
        """The configuration with everything that the solver chose written into it."""
        best = self.solution.best
        return chosen_config(best.config, best.plan)

    @property
    def timed(self) -> bool:
        """Whether times can be predicted: the network between ranks is not measured."""
        return self.speeds is not None and self.hardware.sharding.world_size == 1

    def prediction(self) -> Prediction:
        """Peaks and seconds, as prediction.json has them."""
        best = self.solution.best
        memory = self.memory()
        tiers = {str(tier): nbytes for tier, nbytes in memory.ledger_peaks.items()}
        rss = memory.places[Tier.HOST].peak_nbytes
        bounds = tuple(sorted(map(str, memory.bounds)))
        step = best.step if self.timed else None
        if step is None:
            return Prediction(tiers, rss, None, None, {}, bounds)
        links = {link.name: LinkPrediction(link.seconds, link.nbytes) for link in step.links}
        return Prediction(tiers, rss, step.seconds, step.bottleneck, links, bounds)

    def memory(self) -> MemoryEstimate:
        best = self.solution.best
        baseline = known_baseline(best.config.precision, gpu=best.plan.gpu)
        facts, workload = self.known.facts_of(best.config), self.known.workload
        planned = PlannedMemory(best.plan, best.config, self.model, facts, workload, baseline)
        return planned.estimate()

    def advice(self, measured_s: float) -> list[Change]:
        """What would make a step faster, judged with speeds corrected by a measured step; nothing
        where they would be corrected beyond what speeds can be wrong by."""
        best = self.solution.best
        if self.speeds is None or best.step is None:
            return []
        speeds = corrected(self.speeds, best.step, measured_s)
        if speeds is None:
            return []
        known = replace(self.known, speeds=speeds)
        now = solve(self.config, self.model, self.hardware, known).best
        return advise(Situation(self.given, self.model, self.hardware, known, now))


def forecast(
    config: OffloadConfig, model: nn.Module, workload: Workload, sharding: Sharding = ALONE,
    here: int | None = None,
) -> Forecast | None:  # fmt: skip
    """The plan of a run that knows its workload. `config` is as it was given, with
    `optimizer.in_backward` as the loop will have it; `model` is on the meta
    device and is not trained: its passes are traced again when advice is asked for.

    None, with one warning, where the model's passes cannot be traced. Where speeds
    have never been measured here, that is done if the model is large enough to be worth it. `here`:
    ranks on this machine, by default those that are.
    """
    shape = discover(model, config.groups.blocks).shape()
    facts = Facts(model, workload, compute_device(config).type)
    return forecast_of(config, shape, facts, workload, sharding, here)


def forecast_of(
    config: OffloadConfig, shape: ModelShape, facts: FactsOf, workload: Workload,
    sharding: Sharding = ALONE, here: int | None = None,
) -> Forecast | None:  # fmt: skip
    """As `forecast`, of a model known by its shape; `facts`: what its passes take."""
    device = compute_device(config)
    hardware = this_machine(config.nvme, device, sharding, here)
    speeds = _speeds(config, shape)
    gpu = accelerator.is_accelerator(device)
    baseline = known_baseline(config.precision, gpu=gpu)
    try:
        known = RunFacts(
            workload, speeds or replace(NOMINAL, gpu=gpu),
            facts, baseline.ram_nbytes, baseline.gpu_nbytes,
            baseline.more_nbytes,
        )  # fmt: skip
        solution = solve(config, shape, hardware, known)
    except UnsupportedError as error:
        _log.warning("no prediction for this run: %s", error)
        return None
    return Forecast(config, shape, hardware, known, speeds, solution)


def workload_of(config: OffloadConfig) -> Workload:
    """What one step of `offload train` is given."""
    train = config.train
    return Workload(train.batch, train.sequence, config.gradient_accumulation_steps)


class Facts:
    """What a pass takes, traced once per choice of what it depends on."""

    def __init__(self, model: nn.Module, workload: Workload, device: str) -> None:
        self._model = model
        self._workload = workload
        self._device = device
        self._found: dict[tuple[object, int], ActivationFacts] = {}

    def __call__(self, config: OffloadConfig) -> ActivationFacts:
        key = (config.placement.activations.checkpoint, config.micro_batches)
        if key not in self._found:
            self._found[key] = trace_activations(
                self._model, config, self._workload, device=self._device
            )
        return self._found[key]


def _speeds(config: OffloadConfig, model: ModelShape) -> Speeds | None:
    paths = nvme_paths(config.nvme)
    known = known_speeds(paths)
    worth_it = model.numel * ITEMSIZE[config.precision] >= WORTH_MEASURING_NBYTES
    if known is not None or not worth_it:
        return known
    _log.warning("measuring this machine's speed, once: some seconds")
    return machine_speeds(paths)
