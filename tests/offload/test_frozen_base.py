"""Checkpoints without their frozen base: what trains, and a hash of the rest, onto which they load
with the same bits, and onto nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offload
from offload import checkpoint
from offload.checkpoint.format.manifest import MANIFEST, Manifest
from offload.cli.app import main
from offload.errors import CheckpointError, StateError
from tests.offload.engine_cases import HOST, NVME, config, min_budget, seeded
from tests.offload.engine_states import assert_same_bits, states_of
from tests.offload.lora_memory import Adapted
from tests.offload.test_frozen_weights import build, train

MIXED = {"parameters": "nvme", "gradients": "host", "optimizer": {"host": "50%", "nvme": "50%"}}


def keys(folder: Path, placement: Any = HOST, **more: Any) -> dict[str, Any]:
    return config(folder, placement, groups={"blocks": ["Adapted"]}, **more)


def of_rank(rank: int, width: int) -> nn.Sequential:
    """As `build`, with adapters of another rank."""
    model = nn.Sequential(*(Adapted(width) for _ in range(3)), build()[3])
    for each in [*model][:3]:
        each.down, each.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
    return model


def whole() -> nn.Module:
    return build().requires_grad_(True)


def saved(folder: Path, make: Callable[[], nn.Module] = build) -> tuple[Path, Manifest]:
    with offload.initialize(seeded(make), keys(folder, precision="bf16")) as engine:
        engine.save_checkpoint(folder / "saved", frozen=False)
    return folder / "saved", Manifest.from_json((folder / "saved" / MANIFEST).read_bytes(), "")


@pytest.mark.parametrize("storage", [{}, {"storage": {"weights": "nf4"}}], ids=["", "nf4"])
@pytest.mark.parametrize(("precision", "wait"), [("fp32", True), ("bf16", True), ("bf16", False)])
@pytest.mark.parametrize(("here", "there"), [(HOST, NVME), (NVME, MIXED)])
def test_it_resumes_to_the_same_bits_under_any_placement(
    here: Any, there: Any, wait: bool, precision: str, storage: Any, tmp_path: Path
) -> None:
    more = {"precision": precision, **storage}
    with offload.initialize(seeded(build), keys(tmp_path, here, **more)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "step-2", frozen=False, wait=wait)
        train(engine, 2)
        engine.checkpoint_saved()
        expected = states_of(engine)
    model = seeded(build)  # other adapters on the same base
    for param in (each for each in model.parameters() if each.requires_grad):
        param.data.add_(1)
    with offload.initialize(model, keys(tmp_path, there, **more)) as engine:
        engine.load_checkpoint(tmp_path / "step-2")
        train(engine, 2)
        assert_same_bits(states_of(engine), expected)
        engine.save_checkpoint(tmp_path / "step-4", frozen=False)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-4"
    assert checkpoint.prune(tmp_path, keep_last=1) == [tmp_path / "step-2"]


def test_it_has_little_more_bytes_than_the_states_of_adapters(tmp_path: Path) -> None:
    path, manifest = saved(tmp_path, lambda: of_rank(16, 1024))
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    trained = 3 * 2 * 16 * 1024
    assert trained * 12 < nbytes <= 1.05 * trained * 12, "weights, low halves, two moments"
    assert manifest.base is not None
    assert saved(tmp_path, whole)[1].base is None
    with pytest.raises(StateError, match="all are frozen; set requires_grad"):
        saved(tmp_path, lambda: build().requires_grad_(False))


def test_the_base_is_read_once_and_again_where_it_was_written(tmp_path: Path) -> None:
    wide = keys(tmp_path, NVME)
    wide["budget"] = {**wide["budget"], **min_budget(build, wide)}
    with offload.initialize(seeded(build), wide) as engine:
        read = []
        for name in ("saved", "again"):
            before = engine.report().bytes_moved["nvme read"]
            engine.save_checkpoint(tmp_path / name, frozen=False)
            read.append(engine.report().bytes_moved["nvme read"] - before)
        assert read[0] - read[1] >= 64 * 64 * 4
        base = engine.module[1].base.weight
        with engine.gathered(base), torch.no_grad():
            base.mul_(2)
        with pytest.raises(CheckpointError, match=r"1.base.weight differ \(1 of 5 .*not merged"):
            engine.load_checkpoint(tmp_path / "saved")
        train(engine, 1)  # a refused load changes nothing
        engine.save_checkpoint(tmp_path / "later", frozen=False)
        engine.load_checkpoint(tmp_path / "later")
        with engine.gathered(base), torch.no_grad():
            base.mul_(2)
        engine.save_checkpoint(tmp_path / "whole")
        engine.load_checkpoint(tmp_path / "whole")
        with pytest.raises(CheckpointError, match=r"1.base.weight differ"):
            engine.load_checkpoint(tmp_path / "later")


@pytest.mark.parametrize(
    ("make", "more", "error"),
    [
        (lambda: seeded(build, 7), {}, r"frozen base [0-9a-f]{16}, and this .*\(5 of 5"),
        (lambda: seeded(whole), {}, "requires_grad False"),
        (lambda: seeded(lambda: of_rank(8, 64)), {}, "has shape"),
        (lambda: seeded(build), {"precision": "fp32"}, "precision: bf16"),
        (lambda: seeded(build), {"storage": {"weights": "int8"}}, r"storage: None \(here: .*int8"),
    ],
)
def test_onto_anything_else_it_is_not_loaded(
    make: Callable[[], nn.Module], more: dict[str, Any], error: str, tmp_path: Path
) -> None:
    path, _ = saved(tmp_path)
    with offload.initialize(make(), keys(tmp_path, **{"precision": "bf16", **more})) as engine:
        before = states_of(engine)
        with pytest.raises(CheckpointError, match=error):
            engine.load_checkpoint(path)
        assert_same_bits(states_of(engine), before)
    with pytest.raises(CheckpointError, match=r"frozen=False.*engine.load_checkpoint"):
        offload.initialize(seeded(build), keys(tmp_path), weights=path)


def test_the_command_line_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, manifest = saved(tmp_path)
    assert manifest.base is not None
    file = tmp_path / "adapters.safetensors"
    for arguments, expected in [
        (("inspect", path), f"without its frozen base: 5 parameters, XXH3 {manifest.base.name}"),
        (("verify", path), f"for the frozen base {manifest.base.name}, which is not in it"),
        (("export", path, tmp_path / "folder"), "OUT.safetensors for the trained ones"),
        (("export", path, file), f"wrote {file}"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(["checkpoint", *map(str, arguments)])
        assert (caught.value.code or 0) == ("folder" in str(arguments[-1]))
        assert expected in " ".join("".join(capsys.readouterr()).split())
    assert load_file(file).keys() == {f"{n}.{w}.weight" for n in range(3) for w in ("down", "up")}
