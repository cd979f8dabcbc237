"""Stages of a pipeline, each with an engine of its own; run by every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import offload
from tests.offload.engine_cases import seeded
from tests.ranks.parallel_models import LENGTH, WIDTH, Case, Model, keys_of

MICRO_BATCHES, ROWS = 4, 2  # per micro-batch


@dataclass(frozen=True)
class Pipeline:
    schedule: str  # a class of torch.distributed.pipelining
    case: Case
    scaled: bool = False  # the schedule divides gradients by the number of micro-batches


@dataclass(frozen=True)
class Outcome:
    losses: list[float]  # of the last stage, per micro-batch
    weights: dict[str, Tensor]  # of this rank's stages


class Stage(nn.Module):
    """Some of the model's modules, under their names there."""

    def __init__(self, model: Model, names: Sequence[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name.replace(".", "/"): model.get_submodule(name) for name in names}
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


CUTS = {
    1: [["first", "blocks.0", "blocks.1", "frozen", "last"]],
    2: [["first", "blocks.0"], ["blocks.1", "frozen", "last"]],
    4: [["first"], ["blocks.0"], ["blocks.1"], ["frozen", "last"]],
}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Its share of the mean over all micro-batches."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO_BATCHES


def mean_of_its_own(logits: Tensor, targets: Tensor) -> Tensor:
    return loss_of(logits, targets) * MICRO_BATCHES


def data_of(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * MICRO_BATCHES
    return [
        (torch.randn(rows, LENGTH, WIDTH, generator=generator),
         torch.randint(5, (rows, LENGTH), generator=generator))
        for _ in range(steps)
    ]  # fmt: skip


def run(pipeline: Pipeline, replicas: int, folder: str) -> Outcome:
    """This rank's part. `replicas` pipelines beside each other train with different data."""
    ways = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (ways, replicas), mesh_dim_names=("pp", "dp"))
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    schedule_class: Any = getattr(pipelining, pipeline.schedule)
    several = issubclass(schedule_class, pipelining.schedules.PipelineScheduleMulti)
    cuts = CUTS[2 * ways if several else ways]
    mine = range(rank, len(cuts), ways)
    if "ZBV" in pipeline.schedule:
        mine = (rank, len(cuts) - 1 - rank)  # type: ignore[assignment]
    model = seeded(Model)
    engines, stages = [], []
    for number in mine:
        module = Stage(model, cuts[number])
        engines.append(offload.initialize(module, keys_of(pipeline.case, folder), mesh=mesh["dp"]))
        stages.append(
            pipelining.PipelineStage(module, number, len(cuts), torch.device("cpu"), group=group)
        )
    schedule = schedule_class(
        stages if several else stages[0],
        MICRO_BATCHES,
        loss_fn=mean_of_its_own if pipeline.scaled else loss_of,
        scale_grads=pipeline.scaled,
    )
    losses: list[float] = []
    for x, y in data_of(pipeline.case.steps):
        here: list[Tensor] = []
        share = mesh.get_local_rank("dp")
        args = (x.chunk(replicas)[share],) if 0 in mine else ()
        last = {"target": y.chunk(replicas)[share], "losses": here}
        schedule.step(*args, **(last if len(cuts) - 1 in mine else {}))
        losses += [loss.item() / (MICRO_BATCHES if pipeline.scaled else 1) for loss in here]
        for engine in engines:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    weights = {}
    for engine in engines:
        for name, value in engine.module.state_dict().items():
            weights[name.removeprefix("parts.").replace("/", ".")] = value
        engine.check_integrity()
        engine.close()
    return Outcome(losses, weights)


def run_all(pipelines: Sequence[Pipeline], replicas: int, folder: str) -> list[Outcome]:
    return [run(each, replicas, folder) for each in pipelines]


def alone(case: Case, folder: str) -> Outcome:
    """One rank, with as many backward passes as there are micro-batches."""
    losses = []
    with offload.initialize(seeded(Model), keys_of(case, folder)) as engine:
        for x, y in data_of(case.steps):
            for piece, targets in zip(x.split(ROWS), y.split(ROWS), strict=True):
                loss = loss_of(engine.module(piece), targets)
                engine.backward(loss)
                losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return Outcome(losses, engine.module.state_dict())
