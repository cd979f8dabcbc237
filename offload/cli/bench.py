"""`offload bench`: what the hardware can do, what we do and what others do, in one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.errors import GuardedGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offload.bench.record import Record
    from offload.bench.rounds import Say
    from offload.bench.table import Column

bench_app = typer.Typer(
    cls=GuardedGroup,
    help="Measure the hardware's limit, offload and its peers, interleaved; print ratios.",
    no_args_is_help=True,
)

Rounds = Annotated[
    int, typer.Option("--rounds", min=1, metavar="N", help="Rounds; medians are taken over them.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every measurement there, too.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="Threads. Default: all cores.")
]
Folder = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Folder for files. Default: the temporary folder."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Train as FILE says. Default: a 151 M Llama."),
]
Override = Annotated[
    list[str] | None,
    typer.Option("-o", "--option", metavar="KEY=VALUE", help="Replace a value. Repeatable."),
]


def _size(option: str, text: str) -> int:
    from offload.tiers.errors import ConfigError
    from offload.tiers.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@bench_app.command()
def adam(
    numel: Annotated[
        int | None,
        typer.Option("--numel", min=1, metavar="N", help="Parameters. Default: 100 M if they fit."),
    ] = None,
    rounds: Rounds = 7,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """The optimizer's step: ours, torch's and DeepSpeed's against a loop with the same bytes."""
    from offload.bench.adam import COLUMNS, AdamOptions, run_adam
    from offload.bench.record import check_json

    check_json(json)
    with _saying() as say:
        record = run_adam(AdamOptions(numel, rounds, threads), say)
    _finish(record, COLUMNS, json)


@bench_app.command()
def io(
    path: Folder = None,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="Bytes per pass. Default: 1GiB if it fits."),
    ] = None,
    block: Annotated[
        str, typer.Option("--block", metavar="SIZE", help="Bytes per block of our store.")
    ] = "16MiB",
    in_flight: Annotated[
        str, typer.Option("--in-flight", metavar="SIZE", help="Bytes our store has in flight.")
    ] = "64MiB",
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME", help="auto, threads or libaio.")
    ] = "auto",
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Swap files: our block store against the best raw O_DIRECT loop found."""
    from offload.bench.io import COLUMNS, IoOptions, run_io
    from offload.bench.record import check_json
    from offload.swap.backends import resolve_backend

    check_json(json)
    options = IoOptions(
        path, None if size is None else _size("--size", size), _size("--block", block),
        _size("--in-flight", in_flight), resolve_backend(backend), rounds,
    )  # fmt: skip
    with _saying() as say:
        record = run_io(options, say)
    _finish(record, COLUMNS, json)


@bench_app.command()
def copy(
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="Bytes per copy. Default: 1GiB if it fits."),
    ] = None,
    piece: Annotated[
        str, typer.Option("--piece", metavar="SIZE", help="Bytes per piece of our copies.")
    ] = "64MiB",
    rounds: Rounds = 7,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Host and device memory: our copy streams against a raw copy; without a GPU, memory alone."""
    from offload.bench.copy import COLUMNS, CopyOptions, run_copy
    from offload.bench.record import check_json

    check_json(json)
    nbytes = None if size is None else _size("--size", size)
    with _saying() as say:
        record = run_copy(CopyOptions(nbytes, _size("--piece", piece), rounds, threads), say)
    _finish(record, COLUMNS, json)


@bench_app.command()
def step(
    config: Config = None,
    option: Override = None,
    systems: Annotated[
        str,
        typer.Option(
            "--systems",
            metavar="NAMES",
            help="Of plain, host, nvme, deepspeed-cpu, deepspeed-nvme; or deepspeed-nvme-kept, "
            "accumulated, micro-batches. Default: those of the first five that fit.",
        ),
    ] = "",
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAME", help="fp32 or bf16.")
    ] = None,
    path: Folder = None,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Training steps: plain PyTorch, ours on host and nvme, DeepSpeed ZeRO-3; and the roofline."""
    from offload.bench.record import check_json
    from offload.bench.step import StepOptions, run_step
    from offload.bench.step_rows import COLUMNS

    check_json(json)
    overrides = [*(option or []), *([f"precision={precision}"] if precision else [])]
    options = StepOptions(config, tuple(overrides), path, _names(systems), rounds)
    with _saying() as say:
        record = run_step(options, say)
    _finish(record, COLUMNS, json)


@bench_app.command()
def ranks(
    count: Annotated[
        int, typer.Option("--ranks", metavar="N", help="Processes that train together.")
    ] = 2,
    config: Config = None,
    option: Override = None,
    systems: Annotated[
        str,
        typer.Option(
            "--systems",
            metavar="NAMES",
            help="Of stage3, stage2, stage3-nvme, ddp, fsdp2, fsdp2-offload, deepspeed. Default: "
            "all.",
        ),
    ] = "",
    path: Folder = None,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Training steps of several ranks: ours sharded, DDP, FSDP2 and DeepSpeed ZeRO-3."""
    from offload.bench.ranks import COLUMNS, RanksOptions, run_ranks
    from offload.bench.record import check_json

    check_json(json)
    overrides = tuple(option or [])
    options = RanksOptions(count, config, overrides, path, _names(systems), rounds)
    with _saying() as say:
        record = run_ranks(options, say)
    _finish(record, COLUMNS, json)


@contextmanager
def _saying() -> Iterator[Say]:
    """Where a bench says what it is doing: a line on stderr that changes, on a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


def _finish(record: Record, columns: Sequence[Column], json: Path | None) -> None:
    from offload.bench.table import print_record

    print_record(record, columns)  # first: a full disk must not take it along
    if json is not None:
        record.write(json)
