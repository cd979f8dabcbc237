"""The accuracy of the predicted time of a pass of inference: passes of a dispatched model beside
the result of `estimate_step`.

    python -m benchmarks.pass_prediction [--rounds 5] [--cases 'NAME; NAME'] [--path FOLDER]
                                         [--json FILE]

As `benchmarks.step_prediction`, of a model that is not trained: a pass of one token per sequence,
or over prompts. The built-in model has no cache of keys and values; `offload generate` says of each
run how far its prediction was off, cache included.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

import offload
from benchmarks.step_prediction import Case, main
from offload import Dispatched
from offload.bench.contenders import LLAMA_151M
from offload.config import OffloadConfig
from offload.gpt import LanguageModel, build_meta_model
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_forward
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import StepEstimate
from offload.planning.plan.workload import Workload
from offload.planning.step.step_time import estimate_step
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape

_SETTLING, _LEAST_S, _MOST = 3, 1.0, 20
_BF16 = ("precision=bf16",)
_NVME = (*_BF16, "placement.parameters=nvme", "budget.host=128MiB")
_INT4 = ("storage.weights=int4", "storage.skip=[head]")


def _tokens(batch: int, length: int) -> tuple[str, ...]:
    return (f"train.batch={batch}", f"train.sequence={length}")


CASES = (
    Case("151 M bf16, host, 1 x 1", (*_BF16, "placement.parameters=host", *_tokens(1, 1))),
    Case("151 M bf16, nvme, 1 x 1", (*_NVME, *_tokens(1, 1))),
    Case("151 M bf16, nvme, 32 x 1", (*_NVME, *_tokens(32, 1))),
    Case("151 M bf16, nvme, 256 x 1", (*_NVME, *_tokens(256, 1))),
    Case("151 M bf16, nvme, 4 x 256", (*_NVME, *_tokens(4, 256))),
    Case("151 M int4, nvme, 1 x 1", (*_NVME, *_INT4, *_tokens(1, 1))),
    Case("151 M int4, nvme, 32 x 1", (*_NVME, *_INT4, *_tokens(32, 1))),
)  # fmt: skip


@dataclass
class Run:
    """A case with its model, and its results round by round."""

    case: Case
    model: LanguageModel
    owner: Dispatched
    shape: ModelShape
    facts: ActivationFacts
    workload: Workload
    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)  # read, written
    estimate: StepEstimate | None = None

    def turn(self, speeds: Speeds) -> None:
        """Predict from `speeds`, then measure."""
        plan, config = self.owner.plan, self.owner.config
        self.estimate = estimate_step(plan, config, self.shape, self.facts, self.workload, speeds)
        self.predicted.append(self.estimate.seconds)
        generator = torch.Generator().manual_seed(1)
        size = (self.workload.batch, self.workload.sequence)
        tokens = torch.randint(self.model.config.vocab, size, generator=generator)
        for _ in range(_SETTLING):
            self._pass(tokens)
        before = self.owner.report().bytes_moved["nvme read"]
        seconds: list[float] = []
        while len(seconds) < _MOST and (sum(seconds) < _LEAST_S or len(seconds) < _SETTLING):
            seconds.append(self._pass(tokens))
        read = self.owner.report().bytes_moved["nvme read"] - before
        self.moved.append((read // len(seconds), 0))
        self.measured.append(statistics.median(seconds))

    def _pass(self, tokens: torch.Tensor) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            self.model(tokens)
        return time.perf_counter() - began

    def forget(self) -> None:
        self.measured, self.predicted, self.moved = [], [], []

    def close(self) -> None:
        self.owner.close()


def start(case: Case, folder: Path, stack: ExitStack) -> Run:
    asked = OffloadConfig.load(LLAMA_151M, (*case.overrides, f"nvme.paths=[{folder}]"))
    config = asked.for_inference()
    model = offload.dispatch(build_meta_model(config), config)
    owner = stack.enter_context(offload.dispatched(model))
    meta = build_meta_model(config).requires_grad_(False)
    shape = discover(meta, config.groups.blocks, experts=True).shape().stored(config.stored)
    workload = Workload(config.train.batch, config.train.sequence)
    return Run(case, model, owner, shape, trace_forward(meta, config, workload), workload)


if __name__ == "__main__":
    main(__doc__, "pass prediction", CASES, start)
