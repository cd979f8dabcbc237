"""Is the planner's choice as fast as the best placement tried by hand?

    python -m benchmarks.placement_choice [--file examples/llama-151m.yaml] [--rounds 2] [--steps 5]

Trains a configuration from `examples` for a few steps with several explicit placements and with
`placement: auto`, each in a process of its own, in interleaved rounds. A placement's figure is the
median of its settled steps of all rounds. Placements that do not fit the budgets are left out and
named. `--under COMMAND` puts a command in front of every process, `--pause` seconds between them.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.bench.child import Child, Parent

REPOSITORY = Path(__file__).parents[1]
BY_HAND: dict[str, dict[str, Any]] = {
    "all on nvme": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"},
    "parameters on host": {"parameters": "host", "gradients": "nvme", "optimizer": "nvme"},
    "gradients on host": {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"},
    "parameters, gradients on host": {
        "parameters": "host", "gradients": "host", "optimizer": "nvme",
    },
    "all on host": {"parameters": "host", "gradients": "host", "optimizer": "host"},
    "20 % of parameters on host": {
        "parameters": {"host": "20%", "nvme": "80%"}, "gradients": "nvme", "optimizer": "nvme",
    },
    "20 % of gradients on host": {
        "parameters": "nvme", "gradients": {"host": "20%", "nvme": "80%"}, "optimizer": "nvme",
    },
    "10 % of the optimizer on host": {
        "parameters": "nvme", "gradients": "nvme", "optimizer": {"host": "10%", "nvme": "90%"},
    },
    "30 % of the optimizer on host": {
        "parameters": "nvme", "gradients": "nvme", "optimizer": {"host": "30%", "nvme": "70%"},
    },
}  # fmt: skip
SETTLING_STEPS = 2


def main() -> None:
    arguments = _parser().parse_args()
    cases, chosen = _cases(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(arguments.rounds):
        names = list(cases)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            seconds[name] += _measured(arguments, cases[name])
            print(f"round {number + 1}  {name}: {seconds[name]}", flush=True)
            time.sleep(arguments.pause)
    _print(arguments, seconds, chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", default=str(REPOSITORY / "examples/llama-151m.yaml"))
    parser.add_argument(
        "--option", "-o", action="append", default=[], help="key=value, as in train"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--under", default="", help="a command in front of every process")
    return parser


def _cases(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What is run by name, and what the planner chose in words."""
    from offload.config import OffloadConfig
    from offload.gpt import build_meta_model
    from offload.planning.choice.solver import solve
    from offload.runs.forecast import chosen_config, forecast, workload_of

    config = OffloadConfig.load(arguments.file, arguments.option).owning_the_loop()
    classes = dict.fromkeys(("parameters", "gradients", "optimizer"), "auto")
    config = _with_placement(config, classes)
    found = forecast(config, build_meta_model(config), workload_of(config))
    assert found is not None, "the built-in model can be gone through"
    cases: dict[str, Any] = {"auto": chosen_config(found.solution.best).to_dict()}
    for name, placement in BY_HAND.items():
        named = _with_placement(config, placement)
        best = solve(named, found.model, found.hardware, found.known).best
        if best.fits:
            cases[name] = chosen_config(best).to_dict()
            print(f"{name}: predicted {best.seconds:.2f} s")
        else:
            print(f"{name}: does not fit ({best.shortfalls[0].message.split(';')[0]})")
    placements = found.solution.best.plan.placements.items()
    words = ", ".join(f"{c} {p.describe()}" for c, p in placements)
    print(f"auto: {words}: predicted {found.solution.best.seconds:.2f} s", flush=True)
    return cases, words


def _with_placement(config: Any, placement: dict[str, Any]) -> Any:
    from offload.config import OffloadConfig

    values = config.to_dict()
    values["placement"] = {**values.get("placement", {}), **placement}
    return OffloadConfig.load(values)


def _measured(arguments: argparse.Namespace, values: Any) -> list[float]:
    """Seconds of the settled steps of one process."""
    values = {**values, "train": {**values["train"], "steps": arguments.steps}}
    under = shlex.split(arguments.under)
    with tempfile.TemporaryDirectory() as folder:
        child = Child(
            "a placement", "benchmarks.placement_choice:train", values, Path(folder), under=under
        )
        try:
            steps: list[float] = child.answer()["seconds"]
            child.close()
        finally:
            child.kill()
    return steps[SETTLING_STEPS:]


def train(values: Mapping[str, Any], parent: Parent) -> None:
    """A child's program: seconds of every step."""
    import torch

    import offload
    from offload.config import OffloadConfig
    from offload.gpt import build_meta_model

    config = OffloadConfig.load(values)
    train = config.train
    model = build_meta_model(config)
    generator = torch.Generator().manual_seed(0)
    shape = (train.batch, train.sequence + 1)
    seconds = []
    with offload.initialize(model, config) as engine:
        for _ in range(train.steps):
            tokens = torch.randint(0, 256, shape, generator=generator)
            began = time.perf_counter()
            engine.backward(model(tokens[:, :-1], tokens[:, 1:]).loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
    parent.answer({"seconds": seconds})


def _print(arguments: argparse.Namespace, seconds: dict[str, list[float]], chosen: str) -> None:
    medians = {name: statistics.median(steps) for name, steps in seconds.items()}
    by_hand = {name: value for name, value in medians.items() if name != "auto"}
    best = min(by_hand, key=lambda name: by_hand[name])
    print(f"\n{Path(arguments.file).name} {' '.join(arguments.option)}")
    print(f"{'placement':34} {'s/step':>7} {'steps':>5} {'of the best by hand':>20}")
    for name, value in sorted(medians.items(), key=lambda pair: pair[1]):
        ratio = value / by_hand[best]
        print(f"{name:34} {value:7.2f} {len(seconds[name]):5} {ratio:20.3f}")
    print(f"auto is: {chosen}")


if __name__ == "__main__":
    main()
