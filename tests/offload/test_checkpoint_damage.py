"""What cannot be loaded is refused in one line, before the engine is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.checkpoint.format import manifest
from offload.errors import CheckpointError, StateError, UnsupportedError
from tests.offload.engine_cases import HOST, NVME, TinyLM, config, flip_bit, seeded
from tests.offload.engine_states import assert_same_bits, states_of
from tests.offload.test_checkpoint_forged import edited

FILES = ["manifest.json", "buffers.safetensors", "parameters/002.safetensors",
         "optimizer/002.safetensors"]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    keys = config(tmp_path_factory.mktemp("swap"), NVME, precision="bf16")
    with offload.initialize(seeded(TinyLM, 5), keys) as engine:
        yield engine


def refusal(engine: offload.Engine, path: Path, intact: Path | None = None) -> str:
    """The message of the error, which left the engine as it was. Or, with another one that is
    `intact`, which was met half-way: the engine does nothing until that is loaded."""
    before = states_of(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(path)
    if engine.store.unusable is not None:
        assert intact is not None, "half-way"
        with pytest.raises(StateError, match="load a checkpoint again"):
            states_of(engine)
        engine.load_checkpoint(intact)
    else:
        assert_same_bits(states_of(engine), before)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_damage_says_which_bytes_and_what_to_do(
    engine: offload.Engine, original: Path, saved: Path
) -> None:
    flip_bit(saved / "optimizer/002.safetensors")
    message = refusal(engine, saved, original)
    assert "low (16.3 KiB at byte" in message
    assert "load another checkpoint" in message


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_named_with_its_size(
    engine: offload.Engine, saved: Path, name: str
) -> None:
    (saved / name).unlink()
    assert f"{saved / name} is missing (" in refusal(engine, saved)


def test_a_newer_format_says_which_version_wrote_it(engine: offload.Engine, saved: Path) -> None:
    edited(saved, lambda m: m.update(version=manifest.VERSION + 1, offload="3.1", novelty={}))
    message = refusal(engine, saved)
    assert f"format version {manifest.VERSION + 1} (written by offload 3.1)" in message
    assert f"reads {manifest.VERSION}; load it with that offload" in message


def test_foreign_paths_are_refused_with_what_they_are(
    engine: offload.Engine, tmp_path: Path
) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    empty, weights = tmp_path / "empty", tmp_path / "weights"
    for folder in (empty, weights):
        folder.mkdir()
    (weights / "model.safetensors").write_bytes(b"")

    assert "No such file or directory" in refusal(engine, tmp_path / "nothing")
    assert "Not a directory" in refusal(engine, tmp_path / "model.pt")
    assert "no manifest.json in it; name a folder" in refusal(engine, empty)
    assert "weights=PATH" in refusal(engine, weights)


class Wider(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.register_buffer("extra", torch.zeros(2))


class Untied(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 37, bias=False)


class Frozen(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.position.requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "keys", "fragments"),
    [
        (lambda: TinyLM(blocks=3), {}, ["blocks.2.", " is not in it"]),
        (lambda: TinyLM(blocks=1), {}, ["blocks.1.", " is not in the model"]),
        (Wider, {}, ["norm.weight has shape (32,), here (64,)"]),
        (Untied, {}, ["has tie "]),
        (Frozen, {}, ["position has requires_grad True, here False"]),
        (TinyLM, {"precision": "fp32"}, ["saved with precision: bf16, this engine has precision: "
                                         "fp32", "export"]),
        (TinyLM, {"optimizer": {"master": "fp32"}}, ["optimizer.master: split"]),
        (TinyLM, {"optimizer": {"type": "adam"}}, ["optimizer.type: adamw"]),
        (TinyLM, {"optimizer": {"amsgrad": True}}, ["set optimizer.states and amsgrad"]),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused(
    original: Path, tmp_path: Path, build: Callable[[], nn.Module], keys: dict[str, Any],
    fragments: list[str],
) -> None:  # fmt: skip
    keys = config(tmp_path, HOST, **{"precision": "bf16", **keys})
    with offload.initialize(seeded(build), keys) as engine:
        message = refusal(engine, original)
    for fragment in fragments:
        assert fragment in message


def test_other_buffers_and_param_groups_are_refused(original: Path, tmp_path: Path) -> None:
    model = seeded(TinyLM)
    model.register_buffer("extra", torch.zeros(2))
    with offload.initialize(model, config(tmp_path, HOST, precision="bf16")) as engine:
        with pytest.raises(CheckpointError, match=r'in state_dict: "extra"; build the'):
            engine.load_checkpoint(original)  # the module says so, half-way
        with pytest.raises(StateError, match="are a mixture"):
            states_of(engine)
    model = seeded(TinyLM)
    some = [p for p in model.parameters() if p.requires_grad][:-1]
    keys = config(tmp_path, HOST, precision="bf16")
    with offload.initialize(model, keys, parameters=some) as engine:
        message = refusal(engine, original)
        assert "or other parameters in one of them" in message


def test_what_a_checkpoint_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    model = seeded(TinyLM)
    model.register_buffer("rotation", torch.zeros(2, dtype=torch.complex128))
    with offload.initialize(model, config(tmp_path, HOST)) as engine:
        with pytest.raises(UnsupportedError, match=r"rotation.*persistent=False"):
            engine.save_checkpoint(tmp_path / "saved")
        del model._buffers["rotation"]
        engine.optimizer.param_groups[0]["hook"] = print
        with pytest.raises(UnsupportedError, match="'hook'"):
            engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
