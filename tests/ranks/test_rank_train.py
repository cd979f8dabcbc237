"""`offload train` under `torchrun`: the same file, the same loop, several ranks."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from offload.cli.app import app
from tests.ranks.processes import run_ranks

CONFIG = """
device: cpu
seed: 3
budget: {host: 48MiB, nvme: 64MiB}
placement: {parameters: host, gradients: host, optimizer: nvme}
optimizer: {lr: 2.0e-3, chunk: 16384}
clip_grad_norm: 1.0
train:
  model: {layers: 2, hidden: 64, heads: 2, mlp: 128, max_sequence: 32}
  text: TEXT
  steps: 4
  batch: 2
  sequence: 32
  checkpoint_every: 2
  evaluate_every: 2
  evaluate_batches: 2
  schedule: {type: constant}
  sample: {prompt: "a", length: 8}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.replace("TEXT", str(text)))
    return path


def train_here(file: Path, folder: Path, *more: str) -> tuple[str, str]:
    """The same command in this process, which a launcher has made a rank of; what it says."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        app(["train", str(file), "--run-dir", str(folder), *more], standalone_mode=False)
    return out.getvalue(), errors.getvalue()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_train_and_resume_like_one_with_twice_the_passes(
    file: Path, tmp_path: Path
) -> None:
    run_ranks(
        1, tmp_path, train_here, file, tmp_path / "one", "-o", "gradient_accumulation_steps=2"
    )
    run_ranks(2, tmp_path, train_here, file, tmp_path / "two", "-o", "train.steps=2")
    said = run_ranks(2, tmp_path, train_here, file, tmp_path / "two", "--resume")
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-5)
    assert ["step 4/4" in out for out, _ in said] == [True, False]  # the first rank alone speaks
    # ranks save together by default
    assert not any("wait=False" in errors for _, errors in said)


@pytest.mark.slow  # what starts a launcher imports everything twice more
def test_what_is_wrong_with_the_ranks_is_one_screen(file: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "offload", "train", str(file), "--run-dir", str(tmp_path), "-o", "zero.shard_group=3",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "zero.shard_group: 3 does not divide the 2 ranks" in ended.stderr
    assert "zero/ranks/sharding.py" not in ended.stderr  # no traceback of offload
