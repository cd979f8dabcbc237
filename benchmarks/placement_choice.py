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
from functools import partial
from pathlib import Path
from typing import Any

from offload.bench.contenders import OURS
from offload.bench.rounds import interleaved
from offload.child import Child

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
TRAIN = "benchmarks.gpu_step:train"


def main() -> None:
    arguments = _parser().parse_args()
    cases, chosen = _cases(arguments)

    def turn(name: str) -> list[float]:
        time.sleep(arguments.pause)
        seconds = _measured(arguments, cases[name])
        print(f"{name}: {seconds}", flush=True)
        return seconds

    turns = {name: partial(turn, name) for name in cases}
    found = interleaved(turns, arguments.rounds, lambda text: print(text, flush=True), warmup=0)
    _print(arguments, {name: [s for each in found[name] for s in each] for name in cases}, chosen)


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
    from offload.planning.choice.planner import chosen_config
    from offload.planning.choice.solver import solve
    from offload.runs.forecast import forecast, workload_of

    config = OffloadConfig.load(arguments.file, arguments.option).owning_the_loop()
    classes = dict.fromkeys(("parameters", "gradients", "optimizer"), "auto")
    config = _with_placement(config, classes)
    found = forecast(config, build_meta_model(config), workload_of(config))
    assert found is not None, "the built-in model can be gone through"
    cases: dict[str, Any] = {"auto": found.config.to_dict()}
    for name, placement in BY_HAND.items():
        named = _with_placement(config, placement)
        best = solve(named, found.planned.model, found.planned.hardware, found.planned.run).best
        if best.fits:
            cases[name] = chosen_config(best.config, best.plan).to_dict()
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
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "program": OURS, "settings": {}, "config": values, "steps": arguments.steps,
            "folder": folder,
        }  # fmt: skip
        under = shlex.split(arguments.under)
        child = Child("a placement", TRAIN, options, Path(folder), under=under)
        try:
            steps: list[float] = child.answer()["seconds"]
            child.close()
        finally:
            child.kill()
    return steps[SETTLING_STEPS - 1 :]  # they are counted from the second step on


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
