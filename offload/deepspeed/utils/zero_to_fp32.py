"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint of `engine.save_checkpoint`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.checkpoint.foreign.exporting import export, read_whole
from offload.checkpoint.format.safetensors_file import TensorInfo
from offload.config.paths import StrPath, path_of
from offload.deepspeed.saved import folder_of
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.bits import DTYPES


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: StrPath, tag: str | int | None = None,
    exclude_frozen_parameters: bool = False, lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return parameters (masters, fp32) and persistent buffers by name, whole in RAM. Raise
    CheckpointError if there is no checkpoint, UnsupportedError for `exclude_frozen_parameters`."""
    _refuse(exclude_frozen_parameters)
    found = read_whole(folder_of(path_of(checkpoint_dir, "checkpoint_dir"), tag), "fp32")
    return {name: _tensor(info, raw) for name, (info, raw) in found.items()}


def _tensor(info: TensorInfo, raw: bytearray) -> torch.Tensor:
    dtype = DTYPES[info.dtype]
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(info.shape)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: StrPath, output_dir: StrPath, max_shard_size: str = "5GB",
    safe_serialization: bool = False, tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the fp32 weights to the folder `output_dir`, which must not exist, as safetensors files
    of up to 5 GB, streamed. Raise PathError, CheckpointError or UnsupportedError."""
    _refuse(exclude_frozen_parameters)
    if max_shard_size != "5GB":
        raise UnsupportedError(f"max_shard_size: {max_shard_size}: files have up to 5GB")
    export(
        folder_of(path_of(checkpoint_dir, "checkpoint_dir"), tag),
        path_of(output_dir, "output_dir"),
        "fp32",
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: StrPath, tag: str | int | None = None
) -> Any:
    """Return `model` with those values; names that only one of the two has are left out."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(state, strict=False)
    return model


def _refuse(exclude_frozen_parameters: bool) -> None:
    if exclude_frozen_parameters:
        raise UnsupportedError(
            "exclude_frozen_parameters: checkpoints have all parameters; drop the others by name"
        )
