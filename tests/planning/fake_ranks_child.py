"""One rank of many, the others faked: prints the calls of its third step, as JSON, case by case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the fake backend

import offload
from offload.zero.ranks import collectives as collectives_module
from offload.zero.ranks import rank_watch
from offload.zero.ranks import ranks as ranks_module
from offload.zero.ranks.collectives import Collectives
from offload.zero.ranks.ranks import Ranks
from tests.offload.engine_cases import HOST, TinyLM, batches, config, seeded

STEPS = 3
BLOCKS = 5


class Recorder:
    """Stands before the calls of torch.distributed; keeps those of the last step, but for the small
    ones with which ranks agree."""

    def __init__(self) -> None:
        self.keeps = False
        self.gathers: list[tuple[str, int, int]] = []
        self.reductions: list[tuple[str, int, int]] = []
        self._control: Any = None
        self._replicas: Any = None
        self._make = Ranks.collectives
        self._gather = collectives_module.all_gather_flat
        self._exchange = dist.all_to_all_single

    def install(self) -> None:
        def make(ranks: Ranks) -> Collectives:
            made = self._make(ranks)
            self._control, self._replicas = ranks.control, made.replica_group
            return made

        def gather(whole: Any, own: Any, group: Any) -> None:
            log = self.reductions if group is self._replicas else self.gathers
            self._note(log, "all-gather", whole, group)
            self._gather(whole, own, group)

        def exchange(received: Any, sent: Any, group: Any) -> None:
            self._note(self.reductions, "all-to-all", sent, group)
            self._exchange(received, sent, group=group)

        Ranks.collectives = make  # type: ignore[method-assign]
        collectives_module.all_gather_flat = gather
        dist.all_to_all_single = exchange

    def remove(self) -> None:
        Ranks.collectives = self._make  # type: ignore[method-assign]
        collectives_module.all_gather_flat = self._gather
        dist.all_to_all_single = self._exchange

    def _note(self, log: list[tuple[str, int, int]], call: str, buffer: Any, group: Any) -> None:
        if self.keeps and group is not self._control:
            log.append((call, group.size(), buffer.numel() * buffer.element_size()))


def third_step(world: int, rank: int, keys: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    recorder = Recorder()
    recorder.install()
    try:
        with offload.initialize(seeded(lambda: TinyLM(BLOCKS)), keys) as engine:
            for step in range(STEPS):
                recorder.keeps = step == STEPS - 1
                for tokens in batches(engine.config.gradient_accumulation_steps):
                    engine.backward(engine.module.loss(tokens))  # type: ignore[operator]
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                engine.runtime.settle()
            recorder.keeps = False
            layouts = [group.layout for group in engine.plan.groups]
    finally:
        recorder.remove()
        dist.destroy_process_group()
    return {
        "gathers": recorder.gathers,
        "reductions": recorder.reductions,
        "layouts": [[each.numel, each.numel_trainable, each.ranks] for each in layouts],
    }


def main(asked: str) -> None:
    new_group = dist.new_group

    def new_fake_group(*args: Any, backend: str | None = None, **more: Any) -> Any:
        """Also where one of gloo is asked for: nobody would come."""
        return new_group(*args, **more)

    dist.new_group = new_fake_group
    for module in (ranks_module, rank_watch):
        module.limit_waits = lambda group, limit: None  # type: ignore[attr-defined] # none waits
    cases, folder = json.loads(asked)
    answers = []
    for number, (world, rank, keys) in enumerate(cases):
        own = Path(folder) / str(number)
        own.mkdir()
        whole = config(own, HOST, budget={"host": "4GiB", "nvme": "1GiB"}, **keys)
        answers.append(third_step(world, rank, whole))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
