"""The commands of `offload bench` with others in the same run: DeepSpeed ZeRO-3, DDP and FSDP2.

    python -m benchmarks.peers {step,ranks} [options as of `offload bench`]

Peers are reached through their public interfaces only, are imported only by the modules named for
them, and are optional: a row says what to install. --systems of `step` also has deepspeed-cpu
and deepspeed-nvme; that of `ranks` ddp, fsdp2, fsdp2-offload and deepspeed.
"""

from typing import Any

import typer

from offload.bench.contenders import StepOptions, SystemSpec
from offload.bench.ranks import SYSTEMS as RANK_SYSTEMS
from offload.bench.ranks import run_ranks as run_offload_ranks
from offload.bench.record import Kind, Record
from offload.bench.rounds import Say
from offload.bench.step import HOST, NVME
from offload.bench.step import run_step as run_offload_step
from offload.cli.bench import BenchGroup, bench_app
from offload.cli.errors import failing_io


def _zero3(name: str, device: str) -> SystemSpec:
    return SystemSpec(
        name, f"DeepSpeed ZeRO-3, {device}", Kind.PEER, "benchmarks.trained:DeepSpeedZero3",
        settings={"device": device}, requires="deepspeed",
    )  # fmt: skip


def _torch(name: str, label: str, program: str, **settings: Any) -> SystemSpec:
    program = f"benchmarks.trained:{program}"
    return SystemSpec(name, label, Kind.PEER, program, settings=settings)


ZERO3_CPU = _zero3("deepspeed-cpu", "cpu")
ZERO3_NVME = _zero3("deepspeed-nvme", "nvme")
DDP = _torch("ddp", "DDP", "Replicated")
FSDP2 = _torch("fsdp2", "FSDP2", "FullySharded")
FSDP2_OFFLOAD = _torch("fsdp2-offload", "FSDP2, CPUOffloadPolicy", "FullySharded", offload=True)
ZERO3_RANKS = _zero3("deepspeed", "cpu")


def run_step(options: StepOptions, say: Say) -> Record:
    record = run_offload_step(options, say, (ZERO3_CPU, ZERO3_NVME))
    record.compare(ZERO3_NVME.label, NVME.label, "seconds")
    record.compare(NVME.label, ZERO3_NVME.label, "peak_rss_nbytes")
    record.compare(ZERO3_CPU.label, HOST.label, "seconds")
    record.compare(HOST.label, ZERO3_CPU.label, "peak_rss_nbytes")
    return record


def run_ranks(options: StepOptions, say: Say) -> Record:
    record = run_offload_ranks(options, say, (DDP, FSDP2, FSDP2_OFFLOAD, ZERO3_RANKS))
    full, partly, *_ = (spec.label for spec in RANK_SYSTEMS)
    for of, to in ((full, FSDP2), (full, FSDP2_OFFLOAD), (full, ZERO3_RANKS), (partly, DDP)):
        record.compare(of, to.label, "seconds")
        record.compare(of, to.label, "peak_rss_nbytes")
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
    if command.callback is not None and command.callback.__name__ in ("step", "ranks")
]


def main(arguments: list[str] | None = None) -> None:
    with failing_io(debug=False):
        app(args=arguments)


if __name__ == "__main__":
    main()
