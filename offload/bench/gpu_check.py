"""`make gpu-check`: tests, kernels, copies and training steps on the GPU that is there; one record.

    python -m offload.bench.gpu_check [--out FILE or FOLDER] [--parts NAMES] [--model NAME]
                                      [--memory SIZE] [--folder DIR]

    probe     what the machine has: sizes of the steps are chosen by it
    tests     pytest -m gpu
    kernels   each Triton kernel against a copy of as many bytes
    copies    offload bench copy
    step      the largest Llama that fits, ours; where DeepSpeed is installed, the largest that both
              can hold, ours and DeepSpeed's

Each part is a process of its own with a time limit. The record is written anew after each, so that
whatever ends the check leaves what was found until then. Exit status 1 if a test or a part of ours
failed, 0 otherwise, and 0 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload import __version__
from offload.bench.gpu_markdown import render
from offload.bench.gpu_process import repository
from offload.bench.gpu_run import PARTS, TOTAL_S, Check, Wanted, run_all, say, succeeded
from offload.bench.gpu_sizes import SHAPES
from offload.bench.record import this_machine
from offload.tiers.errors import OffloadError, PathError
from offload.tiers.units import parse_bytes

FORMAT = 1  # of the JSON; raised when a key changes its meaning


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = _parser().parse_args(arguments)
    missing = no_gpu()
    if missing:
        say(missing)
        return 0
    try:
        _check_folder(options.folder)
        with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.folder) as private:
            check = begin(options.out, Path(private))
            run_all(check, Wanted(options.parts, options.model, options.memory))
    except OffloadError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    print(render(check.record))
    say(f"record: {check.out}.json and .md")
    return 0 if succeeded(check.outcomes.values()) else 1


def no_gpu() -> str:
    """Why there is nothing to check, in one line; empty where there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        return f"no GPU check: {sys.executable} has no PyTorch"
    import torch

    if not torch.cuda.is_available():
        return f"no GPU check: PyTorch {torch.__version__} sees no CUDA device here"
    return ""


def begin(out: Path | None, folder: Path) -> Check:
    """An empty record, written. PathError where it cannot be."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    now = datetime.datetime.now(datetime.UTC)
    record: dict[str, Any] = {
        "format": FORMAT, "check": "gpu", "offload": __version__,
        "date": now.strftime("%Y-%m-%d %H:%M UTC"), "hardware": this_machine() | {"gpu": name},
        "machine": {}, "parts": [], "steps": [], "ratios": [], "notes": [],
    }  # fmt: skip
    check = Check(folder, record, _stem(out, name, now), time.monotonic() + TOTAL_S)
    check.write()
    return check


def _stem(out: Path | None, gpu: str, now: datetime.datetime) -> Path:
    """Where the record goes, without suffix; a folder gets the name that it has by default."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    name = f"gpu-{slug}-{now:%Y-%m-%d}"
    if out is None:
        return repository() / "benchmarks" / "records" / name
    if out.is_dir():
        return out / name
    return out.with_suffix("") if out.suffix in (".json", ".md") else out


def _check_folder(folder: Path | None) -> None:
    if folder is not None and not folder.is_dir():
        raise PathError(f"--folder: {folder} is not a folder; name one on the disk to be used")


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(PARTS)}")
    return names


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check the GPU that is there.")
    parser.add_argument(
        "--out", type=Path, metavar="PATH",
        help="the record, without suffix, or a folder for it (default: benchmarks/records)",
    )  # fmt: skip
    parser.add_argument(
        "--parts", type=_parts, default=PARTS, metavar="NAMES",
        help=f"of {', '.join(PARTS)}, separated by commas (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--model", choices=[shape.name for shape in SHAPES],
        help="train this one, however long it may take (default: the largest that has the time)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE",
        help="RAM to count on, where the system says less or shall have less: 64GiB makes the "
        "optimizer of a large model spill to nvme",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="for swap files (default: the temporary folder)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
