"""The fp32 weights of a checkpoint, by DeepSpeed's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.deepspeed import utils
from offload.deepspeed.utils import zero_to_fp32
from offload.tiers.errors import CheckpointError, UnsupportedError
from tests.deepspeed.loops import BASE, batch, initialized, model

BF16 = {**BASE, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}


def test_masters_are_read_whole_or_as_files(tmp_path: Path) -> None:
    net = model()
    net.register_buffer("count", torch.tensor(7))
    with initialized(net, BF16) as engine:
        x, y = batch(0, torch.bfloat16)
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()
        engine.save_checkpoint(tmp_path)
        masters = {
            name: utils.safe_get_full_fp32_param(param) for name, param in net.named_parameters()
        }
        masters["count"] = net.count
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    other = model(5)
    other.register_buffer("count", torch.tensor(0))
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(other, tmp_path, "global_step1")
    for found in state, load_file(tmp_path / "out" / "model.safetensors"), loaded.state_dict():
        assert found.keys() == masters.keys()
        assert all(torch.equal(found[name], master) for name, master in masters.items())
    assert any(
        not torch.equal(each, each.bfloat16().float())
        for each in masters.values()
        if each.is_floating_point()
    )
    with pytest.raises(UnsupportedError, match="drop the others by name"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            tmp_path, exclude_frozen_parameters=True
        )


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="latest is not there; name a tag"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "absent")
