"""Examples run. The configurations for well-known models load, and what their comments say that
memest says of them is still so."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.tiers.units import parse_bytes
from offload.tools.memest.cli import main
from tests.outside.test_causal_lm_counting import PUBLISHED, llama_like

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS: dict[str, dict[str, Any]] = {
    "llama_8b": PUBLISHED["Llama-3-8B"][0],
    "qwen_14b": llama_like("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "llama_70b": PUBLISHED["Llama-3-70B"][0],
}
PLACES = ("device", "host", "nvme")  # the columns of memest's table
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}


def comment_of(name: str) -> str:
    lines = (EXAMPLES / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line[1:].strip() for line in lines if line.startswith("#"))


def seconds(text: str) -> float:
    return sum(float(n) * UNITS[unit] for n, unit in re.findall(r"([\d.]+) (ms|s|min)\b", text))


@pytest.mark.parametrize("name", MODELS)
def test_what_the_comment_says_is_what_memest_says(
    name: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    comment = comment_of(name)
    found = re.search(r"^memest (\S+) (.*?)\n\nsays:", comment, re.MULTILINE | re.DOTALL)
    assert found is not None
    folder, options = found[1], shlex.split(found[2].replace("\\\n", " "))
    assert f'offload.from_pretrained("{folder}", "examples/{name}.yaml")' in comment
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps(MODELS[name]))
    monkeypatch.chdir(EXAMPLES.parent)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / folder), *options, "--format", "json"])
    assert ended.value.code in (0, None), "it fits"
    answer = json.loads(capsys.readouterr().out)
    peaks = re.search(r"^peak +(.+)$", comment, re.MULTILINE)
    step = re.search(r"^One step: (.+), bound by (.+)$", comment, re.MULTILINE)
    assert peaks is not None
    assert step is not None
    for place, said in zip(PLACES, re.findall(r"[\d.]+ \w+", peaks[1]), strict=True):
        nbytes = answer["memory"][place]["peak_nbytes"]
        assert parse_bytes(said.replace(" ", "")) == pytest.approx(nbytes, rel=0.05), place
    assert seconds(step[1]) == pytest.approx(answer["step"]["seconds"], rel=0.1)
    assert step[2] == answer["step"]["bottleneck"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_configuration(path: Path) -> None:
    OffloadConfig.load(path)


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_for_the_model_that_it_names(name: str) -> None:
    written_for = OffloadConfig.load(EXAMPLES / f"{name}.yaml").written_for
    assert written_for is not None
    assert f'"{written_for.model}"' in comment_of(name)


def test_the_loop_of_ones_own_learns() -> None:
    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_loop.py"), "12"], check=True, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    ).stdout  # fmt: skip
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 2
