"""`offload checkpoint`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload.checkpoint.foreign import exporting
from offload.cli.app import main
from tests.offload.engine_cases import NVME, TinyLM, batches, config, flip_bit, seeded
from tests.offload.engine_states import assert_same_bits, losses_of

REPOSITORY = Path(__file__).parents[2]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *map(str, arguments)])
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Checkpoints by precision, with the weights that they should give."""
    checkpoints: dict[str, Any] = {}
    for precision in DTYPES:
        folder = tmp_path_factory.mktemp(precision)
        model = seeded(TinyLM)
        model.register_buffer("seen", torch.tensor(3))
        with offload.initialize(model, config(folder, NVME, precision=precision)) as engine:
            losses_of(engine, batches(3))
            engine.save_checkpoint(folder / "saved")
            weights = model.state_dict()
            masters = {
                name: engine.values.read(p, "master") if p.requires_grad else p.float()
                for name, p in _gathered(engine).items()
            }
        checkpoints[precision] = (folder / "saved", weights, {**masters, "seen": weights["seen"]})
    return checkpoints


def _gathered(engine: offload.Engine) -> dict[str, torch.nn.Parameter]:
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    with engine.gathered():
        frozen = {n: p.detach().clone() for n, p in named.items() if not p.requires_grad}
    return named | {n: torch.nn.Parameter(t, requires_grad=False) for n, t in frozen.items()}


@pytest.fixture
def saved(originals: dict[str, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["bf16"][0], tmp_path / "saved"))


def test_inspect_shows_groups_steps_and_precision(saved: Path, capsys: Any) -> None:
    assert run("inspect", saved) == 0
    output = capsys.readouterr().out
    assert "step 3; precision bf16, optimizer adamw, master split" in output
    assert "param group 0: 20 parameters, lr 0.001" in output
    row = next(line.split() for line in output.splitlines() if line.startswith("blocks.1"))
    assert row == ["blocks.1", "9", "8,384", "8,352", "17.2", "KiB", "83.8", "KiB", "3"]


def test_verify_tells_whole_from_damaged(saved: Path, capsys: Any) -> None:
    assert run("verify", saved) == 0
    assert "is whole: 12 files" in capsys.readouterr().out
    for name in ("optimizer/002.safetensors", "parameters/001.safetensors"):
        flip_bit(saved / name)
    (saved / "buffers.safetensors").unlink()
    assert run("verify", saved) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3, "every damaged file is named"
    assert run("verify", saved / "parameters") == 2
    assert "no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "nothing"], ["inspect", "nothing"],
                                       ["export", "nothing"], ["nonsense"]])  # fmt: skip
def test_usage_errors_end_with_2(arguments: list[str]) -> None:
    assert run(*arguments) == 2


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
def test_export_gives_every_name_in_the_wanted_precision(
    originals: dict[str, Any], tmp_path: Path, precision: str, dtype: str | None
) -> None:
    path, weights, masters = originals[precision]
    option = [] if dtype is None else ["--dtype", dtype]
    assert run("export", path, tmp_path / "out.safetensors", *option) == 0
    exported = load_file(tmp_path / "out.safetensors")
    assert torch.equal(exported["embed.weight"], exported["head.weight"])
    expected = weights
    if dtype not in (None, precision):
        expected = {name: t.to(DTYPES[dtype]) for name, t in masters.items()}
    expected = {**expected, "seen": weights["seen"]}
    assert_same_bits(exported, expected)


def test_export_to_a_folder_is_in_the_layout_of_sharded_models(
    originals: dict[str, Any], tmp_path: Path
) -> None:
    path, weights, _ = originals["bf16"]
    out = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "SHARD", 6000)
        assert run("export", path, out) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert len({*index["weight_map"].values()}) > 3
    exported = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert_same_bits(exported, weights)
    with offload.initialize(
        seeded(TinyLM, 2), config(tmp_path, NVME, precision="bf16"), weights=out
    ) as engine:
        loaded = engine.module.state_dict()
        assert_same_bits(loaded, {name: weights[name] for name in loaded})


def test_export_refuses_to_overwrite_and_leaves_nothing_when_it_fails(
    saved: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out" / "model.safetensors"
    assert run("export", saved, out) == 2
    assert "is no folder; make it" in capsys.readouterr().err
    out.parent.mkdir()
    flip_bit(saved / "parameters/002.safetensors")
    assert run("export", saved, out) == 1
    assert "damaged" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
    out.write_text("precious")
    assert run("export", saved, out) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert out.read_text() == "precious"


def test_looking_at_a_checkpoint_does_not_import_torch(saved: Path) -> None:
    program = (
        "import sys\nfrom offload.cli import main\n"
        f"try:\n    main(['checkpoint', 'verify', {str(saved)!r}])\nexcept SystemExit as ended:\n"
        "    assert not ended.code\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, capture_output=True)
