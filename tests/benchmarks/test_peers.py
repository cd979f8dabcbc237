"""`python -m benchmarks.peers`: the benches of `offload bench`, with others in the same run."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers, trained
from offload.config import OffloadConfig
from tests.offload.test_bench import TINY_MODEL


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        peers.main(list(arguments))
    return int(caught.value.code or 0)


@pytest.fixture
def recorded(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a bench with one round; its rows by name, its ratios, and what it printed."""
    monkeypatch.setenv("COLUMNS", "100")

    def record(*arguments: str) -> tuple[dict[str, Any], list[Any], str]:
        path = tmp_path / "record.json"
        assert run(*arguments, "--rounds", "1", "--json", str(path)) == 0
        content = json.loads(path.read_text())
        rows = {row["name"]: row for row in content["rows"]}
        assert len(rows) == len(content["rows"])
        return rows, content["ratios"], capsys.readouterr().out

    return record


def test_a_missing_peer_says_what_to_install(
    recorded: Any, monkeypatch: Any, capsys: Any
) -> None:  # fmt: skip
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, *more: None if name == "deepspeed" else find_spec(name, *more),
    )  # fmt: skip
    rows, _, printed = recorded("step", "--systems", "plain,deepspeed-cpu", *TINY_MODEL)
    note = rows["DeepSpeed ZeRO-3, cpu"]["note"]
    assert note == "not installed: pip install 'offload[bench]'"
    assert f"DeepSpeed ZeRO-3, cpu: {note}" in printed
    assert run("step", "--systems", "deepspeed-cpu", *TINY_MODEL) == 2
    assert "none of them can be measured: DeepSpeed" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("bench", ["step", "ranks"])
def test_a_system_that_is_unknown_is_answered_with_all_there_are(bench: str, capsys: Any) -> None:
    assert run(bench, "--systems", "fancy") == 2
    known = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err).split("choose from ")[1]
    theirs = {
        "step": {"plain", "nvme", "deepspeed-cpu", "deepspeed-nvme"},
        "ranks": {"stage3", "ddp", "fsdp2", "fsdp2-offload", "deepspeed"},
    }  # fmt: skip
    assert theirs[bench] <= set(known.strip().split(", "))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepspeed_is_given_the_same_optimizer_and_pins_memory_for_a_gpu_alone(device: str) -> None:
    keys = {"precision": "bf16", "clip_grad_norm": 0.5, "optimizer": {"type": "adamw", "lr": 0.25}}
    settings = trained.settings_of(OffloadConfig.load({"device": device, **keys}), "cpu")
    zero = settings["zero_optimization"]
    assert settings["optimizer"]["params"]["lr"] == 0.25
    assert (settings["gradient_clipping"], settings["bf16"]) == (0.5, {"enabled": True})
    for part in ("offload_param", "offload_optimizer"):
        assert zero[part].get("pin_memory", False) is (device == "cuda")


@pytest.mark.slow
def test_ranks_of_others_train_as_offload_does(recorded: Any, tmp_path: Path, long: bool) -> None:
    if not long:
        pytest.skip("a quarter of a minute: with --long")
    systems = "stage3,ddp,fsdp2-offload"
    rows, ratios, printed = recorded("ranks", "--systems", systems, *TINY_MODEL)
    labels = ["offload, stage 3, host", "DDP", "FSDP2, CPUOffloadPolicy"]
    assert all(rows[label]["measures"]["seconds"] for label in labels)
    assert "has other losses" not in printed
    pairs = {(ratio["of"], ratio["to"]) for ratio in ratios}
    assert pairs == {("offload, stage 3, host", "FSDP2, CPUOffloadPolicy")}
    for row in rows.values():
        for measure, values in row["measures"].items():
            assert row["medians"][measure] == statistics.median(values)
