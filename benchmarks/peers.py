"""The commands of `offload bench` with others in the same run: the optimizers of PyTorch and
DeepSpeed, and DeepSpeed ZeRO-3.

    python -m benchmarks.peers {adam,step} [options as of `offload bench`]

Peers are reached through their public interfaces only, are imported only by the modules named for
them, and are optional: a row says what to install. --systems of `step` also has deepspeed-cpu
and deepspeed-nvme.
"""

from __future__ import annotations

from typing import Any

import typer

from benchmarks import adam_peers
from offload.bench.adam import AdamOptions
from offload.bench.adam import run_adam as run_our_adam
from offload.bench.contenders import StepOptions, SystemSpec
from offload.bench.record import Kind, Record, Target
from offload.bench.rounds import Say
from offload.bench.step import HOST, NVME
from offload.bench.step import run_step as run_our_step
from offload.cli.bench import BenchGroup, bench_app
from offload.cli.errors import failing_io


def _zero3(
    name: str, label: str, nbytes: int, device: str, **settings: Any
) -> SystemSpec:  # fmt: skip
    return SystemSpec(
        name, f"DeepSpeed ZeRO-3, {label}", Kind.PEER, "benchmarks.trained:DeepSpeedZero3",
        memory_per_parameter=nbytes, settings={"device": device, **settings}, requires="deepspeed",
    )  # fmt: skip


ZERO3_CPU = _zero3("deepspeed-cpu", "cpu", 42, "cpu")
ZERO3_NVME = _zero3("deepspeed-nvme", "nvme", 55, "nvme")


def run_adam(options: AdamOptions, say: Say) -> Record:
    record = run_our_adam(options, say, adam_peers.systems)
    adam_peers.compare(record)
    return record


def run_step(options: StepOptions, say: Say) -> Record:
    record = run_our_step(options, say, (ZERO3_CPU, ZERO3_NVME))
    record.compare(ZERO3_NVME.label, NVME.label, "seconds", Target(1.7))
    at_most = Target(0.25, at_most=True)
    record.compare(NVME.label, ZERO3_NVME.label, "peak_rss_nbytes", at_most)
    record.compare(ZERO3_CPU.label, HOST.label, "seconds", Target(1.4))
    record.compare(HOST.label, ZERO3_CPU.label, "peak_rss_nbytes")
    return record


class PeersGroup(BenchGroup):
    functions = "benchmarks.peers:run_{0}"


app = typer.Typer(
    cls=PeersGroup, help=__doc__, no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
app.registered_commands = [
    command
    for command in bench_app.registered_commands
    if command.callback is not None and command.callback.__name__ not in ("copy", "io")
]


def main(arguments: list[str] | None = None) -> None:
    with failing_io(debug=False):
        app(args=arguments)


if __name__ == "__main__":
    main()
