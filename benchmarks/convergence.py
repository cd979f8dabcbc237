"""Validation loss with approximate optimizer states against exact ones, at equal steps.

    python -m benchmarks.convergence [--config examples/shakespeare.yaml] [-o train.steps=400 ...]
                                     [--precision bf16] [--seeds 3] [--json FILE]

Per seed, trains the same model on the same batches from the same weights once per format of
states, and prints the last validation losses and their mean distance from that of fp32 states, with
its standard error over the seeds. The control has fp32 states and a learning rate off by one part
in 10,000: its distance is what any change of the last bits makes of a training.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offload.bench.record import Kind, Record, Row
from offload.bench.table import Column, number, print_record, span
from offload.config import OffloadConfig
from offload.runs.folder import RunFolder
from offload.train.loop import run

ROOT = Path(__file__).resolve().parent.parent
CONTROL = "control: fp32 states, rate + 1e-4"
# The first is what the others are measured by.
VARIANTS: dict[str, list[str]] = {
    "fp32 states": ["optimizer.states=fp32"],
    CONTROL: ["optimizer.states=fp32"],
    "bf16 states": ["optimizer.states=bf16"],
    "int8 states": ["optimizer.states=int8"],
    "fp32 in host, int8 on nvme": ["optimizer.states={host: fp32, nvme: int8}"],
}
SIXTEEN_BITS = {
    "no master": ["optimizer.master=none"],
    "no master, int8 states": ["optimizer.master=none", "optimizer.states=int8"],
}


def train(config: OffloadConfig, folder: Path) -> float:
    """The last validation loss of one run."""
    result = run(config, RunFolder.new(folder), console=Console(file=io.StringIO()))
    assert result.validation_loss is not None, "the last step of a run is evaluated"
    return result.validation_loss


def measure(
    path: Path, overrides: list[str], seeds: int, *, sixteen_bits: bool
) -> dict[str, list[float]]:
    """The validation loss of each variant under each seed."""
    variants = VARIANTS | (SIXTEEN_BITS if sixteen_bits else {})
    losses: dict[str, list[float]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for number, (name, keys) in enumerate(variants.items()):
                base = OffloadConfig.load(path, [*overrides, f"seed={seed}"])
                if name == CONTROL:
                    keys = [*keys, f"optimizer.lr={base.optimizer.lr * 1.0001!r}"]
                config = OffloadConfig.load(base, keys)
                losses[name].append(train(config, Path(folder) / f"{seed}-{number}"))
                print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    return losses


COLUMNS = (
    Column("loss", number("validation_loss", digits=4)),
    Column("% off fp32", number("distance", 0.01)),
    Column("error, %", number("standard_error", 0.01)),
    Column("range, %", lambda row: span([100 * each for each in row.measures["distances"]])),
)


def row_of(name: str, losses: Sequence[float], reference: Sequence[float]) -> Row:
    """Means over seeds, and the distance from exact training seed by seed."""
    distances = [loss / other - 1 for loss, other in zip(losses, reference, strict=True)]
    seeds = len(losses)
    error = statistics.stdev(distances) / math.sqrt(seeds) if seeds > 1 else math.nan
    facts = {
        "validation_loss": statistics.mean(losses), "distance": statistics.mean(distances),
        "standard_error": error,
    }  # fmt: skip
    return Row(name, Kind.OURS, {"losses": list(losses), "distances": distances}, facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "shakespeare.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    overrides = [*options.overrides, f"precision={options.precision}"]
    config = OffloadConfig.load(options.config, overrides)
    sixteen_bits = options.precision == "bf16"
    losses = measure(options.config, overrides, options.seeds, sixteen_bits=sixteen_bits)
    reference = next(iter(losses.values()))
    record = Record("convergence", {"config": options.config.name, "overrides": overrides})
    record.rows = [row_of(name, values, reference) for name, values in losses.items()]
    spread = (max(reference) - min(reference)) / statistics.mean(reference)
    record.notes += [
        f"{config.train.model.shape}, {options.precision}, {config.train.steps} steps",
        f"from seed to seed, the loss with fp32 states varies by {spread:.2%}",
    ]
    print_record(record, COLUMNS)
    if options.json is not None:
        record.write(options.json)


if __name__ == "__main__":
    main()
