"""Torch tensors as the flat arrays that kernels take: formats, and views without a copy."""

import numpy as np
import torch

from offload.kernels.floats import Array, Float

FLOAT_OF = {torch.float32: Float.FP32, torch.bfloat16: Float.BF16, torch.float16: Float.FP16}
DTYPE_OF = {value: key for key, value in FLOAT_OF.items()}


def array_of(flat_bytes: torch.Tensor, kind: Float) -> Array:
    """Return the kernels' view of 1D uint8 host memory: float32, or uint16 bits."""
    return flat_bytes.numpy().view(kind.storage)


def flat_array(tensor: torch.Tensor) -> Array:
    """Return the kernels' view of a contiguous host tensor's elements, 1D."""
    flat = tensor.reshape(-1)
    if flat.dtype is torch.float32:
        array: Array = flat.numpy()
        return array
    return flat.view(torch.int16).numpy().view(np.uint16)
