"""Trains what demo.yaml says with offload, then the same in plain PyTorch, and compares both.

python examples/demo.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from offload.config import OffloadConfig
from offload.process.machine import peak_rss_nbytes
from offload.runs.folder import default_path
from offload.tiers.units import format_bytes
from offload.train.plain import Plain
from offload.train.text import Batches

FILE = Path(__file__).with_name("demo.yaml")


def plain_steps(config: OffloadConfig) -> tuple[list[float], list[float]]:
    """Train in plain PyTorch from the same first weights, on the same batches; return the loss and
    the seconds of every step."""
    batches, train = Batches.of(config), config.train
    plain = Plain(config, batches.device)
    losses, seconds = [], []
    for step in range(train.steps):
        began = time.perf_counter()
        for group in plain.optimizer.param_groups:
            group["lr"] = config.optimizer.lr * train.schedule.factor(step, train.steps)
        losses.append(plain.step([batches.train_at(step, 0)]).loss)
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def main() -> None:
    folder = default_path("demo")
    command = [sys.executable, "-m", "offload", "train", str(FILE), "--run-dir", str(folder)]
    subprocess.run([*command, *sys.argv[1:]], check=True)
    print("\nthe same in plain PyTorch, with everything in RAM ...", flush=True)
    # the values of the options, too
    config = OffloadConfig.load(folder / "config.resolved.yaml")
    losses, seconds = plain_steps(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = json.loads((folder / "measured.json").read_text())
    last_loss, usual_s = rows[-1]["loss"], median(row["seconds"] for row in rows)
    peak, plain_peak = format_bytes(measured["rss_nbytes"]), format_bytes(peak_rss_nbytes())
    print(f"{'':28} {'offload':>12} {'plain PyTorch':>14}")
    print(f"{'peak RAM of the process':28} {peak:>12} {plain_peak:>14}")
    print(f"{'seconds per step (median)':28} {usual_s:12.3f} {median(seconds):14.3f}")
    print(f"{'loss of the last step':28} {last_loss:12.6f} {losses[-1]:14.6f}")
    apart = max(abs(row["loss"] - loss) for row, loss in zip(rows, losses, strict=True))
    print(f"losses are at most {apart:.1g} apart: offload's AdamW fuses multiply and add")


if __name__ == "__main__":
    main()
