"""The format of a folder's weights, which `quantization_config` in config.json specifies."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from offload.checkpoint.foreign.model_files import CONFIG, read_json
from offload.quantized import bitsandbytes, compressed_tensors, float8, gptq_and_awq
from offload.quantized.matrix import Matrix
from offload.quantized.parts import Parts
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.tensor_file import Stored

_READ: dict[str, Callable[[Mapping[str, Any], Parts], dict[str, Matrix]]] = {
    "awq": gptq_and_awq.awq,
    "bitsandbytes": bitsandbytes.matrices,
    "compressed-tensors": compressed_tensors.matrices,
    "fbgemm_fp8": float8.fbgemm,
    "fp8": float8.fp8,
    "gptq": gptq_and_awq.gptq,
    "mxfp4": float8.mxfp4,
}
# Ends of names that only parts of quantized weights have.
_ENDS = (
    ".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".weight_zero_point",
    ".weight_shape", ".weight_g_idx", ".weight.absmax", ".weight.quant_map",
    ".weight.nested_absmax", ".weight.nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4",
    ".SCB", ".weight_format", ".weight_scale_inv",
    ".weight_global_scale", "_proj_blocks", "_proj_scales",
)  # fmt: skip
_GET = "get the whole folder again"


def settings_of(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization settings of config.json; None if the weights are not quantized.

    Raise UnsupportedError for formats that are not read.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    entry = config.get("quantization_config", inner)
    if entry is None:
        return None
    method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
    if isinstance(entry, Mapping) and method is None:  # as transformers understands it
        method = "bitsandbytes" if entry.get("load_in_4bit") or entry.get("load_in_8bit") else None
    if not isinstance(entry, Mapping) or str(method) not in _READ:
        raise UnsupportedError(
            f"{folder} has weights quantized by {method!s:.40}, which is not read here (read are "
            f"{', '.join(_READ)}); load it once with transformers and its own library, call "
            "model.dequantize(), and save_pretrained it to another folder"
        )
    return {**entry, "quant_method": str(method)}


def settings_in(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization settings of a folder, which may have no config.json."""
    path = folder / CONFIG
    return settings_of(read_json(path), folder) if path.is_file() else None


def matrices_of(stored: dict[str, Stored], settings: Mapping[str, Any] | None) -> dict[str, Matrix]:
    """Return the quantized weights by their names; all of their parts are taken out of `stored`.

    Raise CheckpointError if tensors and `settings` disagree, UnsupportedError for unsupported
    formats. Nothing of the size of a weight is read or allocated.
    """
    matrices = {} if settings is None else _READ[settings["quant_method"]](settings, Parts(stored))
    left = next((name for name in stored if name.endswith(_ENDS)), None)
    if left is not None:
        if settings is None:
            raise CheckpointError(
                f"{left} is of a quantized weight, and config.json has no quantization_config "
                "that says how: put it there (it may be in quantize_config.json), or get the "
                "folder again"
            )
        raise CheckpointError(
            f"{left} belongs to no weight of {settings['quant_method']}, which config.json says "
            f"the weights are quantized by; {_GET}"
        )
    if settings is not None:
        _check_rest(stored, matrices, str(settings["quant_method"]))
    return matrices


def _check_rest(stored: Mapping[str, Stored], matrices: Mapping[str, Matrix], method: str) -> None:
    if not matrices:
        raise CheckpointError(
            f"config.json says that weights are quantized by {method}, and none is; {_GET}, or "
            "take quantization_config out of it if its weights are ordinary ones"
        )
    for name, tensor in stored.items():
        is_codes = not tensor.dtype.is_floating_point and name.endswith(".weight")
        if is_codes or (tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point):
            raise CheckpointError(
                f"{name} is {tensor.dtype}, and nothing says what its codes stand for; {_GET}"
            )


def transposed_weights(model: nn.Module) -> set[str]:
    """Return the weights of layers that store them as [columns, rows] (GPT-2's); formats store them
    as a linear layer does."""
    library: Any = sys.modules.get("transformers.pytorch_utils")
    if library is None:
        return set()
    return {
        f"{name}.weight" for name, module in model.named_modules()
        if isinstance(module, library.Conv1D)
    }  # fmt: skip
