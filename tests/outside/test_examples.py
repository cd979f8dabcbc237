"""Examples run. The configurations for well-known models load, and what their comments say that
memest says of them is still so."""

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
    "qwen3_30b_a3b": PUBLISHED["Qwen3-30B-A3B"][0],
}
PLACES = ("device", "host", "nvme")  # the columns of memest's table
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}


def comment_of(name: str) -> str:
    lines = (EXAMPLES / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line[1:].strip() for line in lines if line.startswith("#"))


def seconds(text: str) -> float:
    return sum(float(n) * UNITS[unit] for n, unit in re.findall(r"([\d.]+) (ms|s|min)\b", text))


@pytest.mark.sample("llama_8b")
@pytest.mark.parametrize("name", MODELS)
def test_what_the_comment_says_is_what_memest_says(
    name: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    comment = comment_of(name)
    command = re.search(r"^memest (\S+) (.*?)\n\nsays:", comment, re.MULTILINE | re.DOTALL)
    assert command is not None
    folder, options = command[1], shlex.split(command[2].replace("\\\n", " "))
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
    places = [place for place in PLACES if place in answer["memory"]]
    for place, said in zip(places, re.findall(r"[\d.]+ \w+", peaks[1]), strict=True):
        nbytes = answer["memory"][place]["peak_nbytes"]
        assert parse_bytes(said.replace(" ", "")) == pytest.approx(nbytes, rel=0.05), place
    assert seconds(step[1]) == pytest.approx(answer["step"]["seconds"], rel=0.1)
    assert step[2] == answer["step"]["bottleneck"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_configuration(path: Path) -> None:
    written_for = OffloadConfig.load(path).written_for
    if path.stem in MODELS:
        assert f'"{written_for and written_for.model}"' in comment_of(path.stem)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder,
        env=environment, timeout=300,
    )  # fmt: skip


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", done.stdout)]


@pytest.mark.slow
def test_the_loop_of_ones_own_learns(tmp_path: Path) -> None:
    losses = losses_of(run(tmp_path, str(EXAMPLES / "own_loop.py"), "12"))
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_the_demo_has_the_losses_of_plain_pytorch(tmp_path: Path) -> None:
    options = ["train.steps=2", "train.sample.length=0", f"train.text={EXAMPLES / 'soliloquy.txt'}"]
    done = run(tmp_path, str(EXAMPLES / "demo.py"), *[f"-o{each}" for each in options])
    assert done.returncode == 0, done.stderr
    apart = re.search(r"losses are at most (\S+) apart", done.stdout)
    assert apart is not None
    assert float(apart[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("ranks", 8), ("sequence_parallel", 40)])
def test_two_ranks_learn_under_torchrun(name: str, steps: int, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, *launcher, str(EXAMPLES / f"{name}.py"), str(steps))
    losses = losses_of(done)
    assert losses[-1] < losses[0] * 0.6
    assert all(f"rank {rank}, MiB" in done.stdout for rank in range(2))
    assert (tmp_path / f"runs/{name}/checkpoint/manifest.json").is_file()
    done = run(tmp_path, str(EXAMPLES / f"{name}.py"))
    assert done.returncode == 1
    assert "start it by torchrun" in done.stderr


def test_lightnings_trainer_learns_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    first, *_, last = (
        losses_of(run(tmp_path, str(EXAMPLES / "lightning_trainer.py"), str(steps)))[-1]
        for steps in (2, 12)
    )
    assert last < first / 2
    assert (tmp_path / "runs/lightning/last.ckpt/manifest.json").is_file()


def test_adapters_learn_and_the_weights_are_not_written(tmp_path: Path) -> None:
    for name in "trl", "peft", "datasets":
        pytest.importorskip(name)
    done = run(tmp_path, str(EXAMPLES / "sft_lora.py"))
    losses = losses_of(done)
    assert losses[-1] < losses[0]
    written = re.search(r"nvme write: (\d+) MiB", done.stdout)
    assert written is not None
    assert int(written[1]) < 100, "the weights once, and the adapters in 30 steps"
    assert (tmp_path / "runs/sft_lora/adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "missing"), [("sft_lora", "datasets"), ("lightning_trainer", "lightning")]
)
def test_what_is_missing_is_named(name: str, missing: str, tmp_path: Path) -> None:
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; sys.path.insert(0, sys.argv[1]); "
    code += f"runpy.run_path(sys.argv[1] + '/{name}.py', run_name='__main__')"
    done = run(tmp_path, "-c", code, str(EXAMPLES))
    assert done.returncode == 1
    assert re.fullmatch(rf"(?i){missing} is missing: pip install .*\n", done.stderr)
