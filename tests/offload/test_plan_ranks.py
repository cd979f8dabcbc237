"""`offload plan --ranks N --nodes M`: one rank's plan, and what all of a machine need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from offload.cli.app import main
from offload.tiers.units import parse_bytes


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    said = capsys.readouterr()
    return int(caught.value.code or 0), said.out, said.err


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "device: cpu\nprecision: fp32\n"
        "budget: {host: 32MiB, nvme: 64MiB}\n"
        f"nvme: {{paths: [{tmp_path}]}}\n"
        "placement: {parameters: host, gradients: host, optimizer: host}\n"
        "train:\n  model: {layers: 2, hidden: 64, heads: 2, max_sequence: 32}\n"
        "  batch: 2\n  sequence: 32\n"
    )
    return str(path)


def row(text: str, name: str) -> list[int]:
    """Bytes of a row of the table, by tier."""
    line = next(line for line in text.splitlines() if line.strip(" │").startswith(name))
    cells = [cell.strip() for cell in re.split("[│┃]", line)[2:-1]]
    return [parse_bytes(cell) if cell != "-" else 0 for cell in cells]


def test_one_rank_of_several_holds_its_shards(yaml: str, capsys: Any) -> None:
    code, alone, _ = run(capsys, yaml)
    assert code == 0
    assert "ZeRO stage" not in alone
    code, several, _ = run(capsys, yaml, "--ranks", "2", "--nodes", "2")
    assert code == 0
    text = " ".join(several.split())
    assert "1 of 4, 2 on each machine; ZeRO stage 3: shards for 4 ranks" in text
    assert "no step time: nothing is known of the network" in text
    for name in ("parameters", "optimizer"):
        assert (
            row(several.partition("Bytes")[2], name)[1]
            < row(alone.partition("Bytes")[2], name)[1] / 3
        )
    needed = row(several, "needed at least")[1]
    assert row(several, "all 2 ranks")[1] == pytest.approx(2 * needed, rel=0.01)


def test_ranks_that_cannot_be_grouped_are_one_line_and_2(yaml: str, capsys: Any) -> None:
    arguments = ("--ranks", "4", "-o", "zero.shard_group=3")
    code, _, error = run(capsys, yaml, *arguments)
    assert code == 2
    assert "zero.shard_group: 3 does not divide the 4" in " ".join(error.split())
