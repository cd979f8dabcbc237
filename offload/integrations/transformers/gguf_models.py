"""Names and values of a GGUF file, as transformers' `from_pretrained(gguf_file=...)` gives them.

transformers dequantizes the whole file. Here its map of names and what it does to a tensor of an
architecture (Llama's permuted queries and keys, Gemma's norms) are applied to one tensor when it is
read, and packed experts are read one at a time.
"""

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers.modeling_gguf_pytorch_utils as library

from offload.display.words import some_of
from offload.quantized.gguf_file import Array, Blocks, Header
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.lazy_tensors import LazyTensor

_log = logging.getLogger("offload")
_PACKED = (library.Qwen2MoeTensorProcessor, library.MiniMaxM2TensorProcessor)
_IN_LAYER = re.compile(r"\.\d+\.")


def config_of(header: Header) -> dict[str, Any]:
    """Return the configuration that transformers makes of a header. Raise UnsupportedError for an
    architecture that it does not know."""
    try:
        return dict(library.load_gguf_checkpoint(str(header.path))["config"])
    except ValueError as error:
        if "is not supported" not in str(error):
            raise
        known = sorted({*library.GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
        raise UnsupportedError(
            f"{header.path} is a model of the architecture {header.architecture!r:.40}, which "
            f"transformers does not read from GGUF; it reads {', '.join(known)}"
        ) from error


def gguf_tensors(
    header: Header, config: Mapping[str, Any], kind: Any, settings: Any
) -> dict[str, LazyTensor]:
    """Return the tensors of a model of class `kind`, by its names. Raise UnsupportedError if the
    file has tensors of layers that transformers does not give to the model, which lacks some."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = kind(copy.deepcopy(settings))
    kinds = library.TENSOR_PROCESSORS
    processor = kinds.get(header.architecture, library.TensorProcessor)(config=config)
    try:
        names = library.get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise UnsupportedError(f"{header.path}: {error}") from error
    left = dict(header.tensors)
    tensors = _experts(processor, names, left)
    for name, blocks in list(left.items()):
        apply = partial(_processed, processor, names, name)
        like = np.broadcast_to(np.float32(-1), blocks.shape)  # takes no memory
        target, values = apply(like)
        if target is not None:
            if values is not like:
                blocks = replace(blocks, shape=values.shape, process=apply)
            tensors[target] = LazyTensor(blocks)
            del left[name]
    missing = [n for n in model.state_dict() if n not in tensors and _IN_LAYER.search(n)]
    if missing and any("blk." in name for name in left):
        raise UnsupportedError(
            f"{header.path}: transformers has no place for {some_of(list(left))} in this model, "
            f"whose {some_of(missing)} would stay without values: it does not read this kind of "
            f"{header.architecture} from GGUF, or model_class is of another architecture"
        )
    if left:
        _log.warning("%s: transformers leaves out %s", header.path, some_of(list(left)))
    return tensors


def _experts(
    processor: Any, names: Mapping[str, str], left: dict[str, Blocks]
) -> dict[str, LazyTensor]:
    """Take the packed experts out of `left`: in the model, gate and up are one tensor."""
    tensors: dict[str, LazyTensor] = {}
    for name in list(left) if isinstance(processor, _PACKED) else ():
        match = processor.GGUF_MOE_WEIGHTS_PATTERN.fullmatch(name)
        target = match and names.get(match["name"])
        if not target or match["w"] == "up":
            continue
        parts = [name] if match["w"] == "down" else [name, name.replace("_gate_", "_up_")]
        shapes = [left[part].shape if part in left else () for part in parts]
        if len(set(shapes)) > 1 or len(shapes[0]) != 3:
            raise CheckpointError(f"{parts} have the shapes {shapes}: get the file again")
        packed: list[torch.Tensor] = [LazyTensor(left.pop(part).experts()) for part in parts]
        whole: Any = torch.cat(packed, dim=1) if len(packed) > 1 else packed[0]
        tensors[target] = whole
    return tensors


def _processed(
    processor: Any, names: Mapping[str, str], name: str, values: Array
) -> tuple[str | None, Array]:
    """Return the name in the model of a tensor (None: there is none), and its values there."""
    parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
    result = processor.process(
        weights=values, name=name, tensor_key_mapping=names, parsed_parameters=parsed
    )
    for target, tensor in parsed["tensors"].items():  # GPT-2's head, which it stores itself
        return target, tensor.numpy()
    return names.get(result.name), result.weights
