"""Model files for tests: written here, byte for byte, so that they can be wrong in every way."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BITS = {  # of an element, by the format's name
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}  # fmt: skip
# by hand: embedding and head, 2 blocks of q, k, v, o, gate, up, down and two norms, the last norm
TINY_LLAMA_NUMEL = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32


def write_config(folder: Path, values: Any = None, **changes: Any) -> Path:
    """A config.json in `folder`: TINY_LLAMA with changes, or other values."""
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY_LLAMA, **changes} if values is None else values))
    return path


def entries_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, Any]:
    """Header entries of tensors that lie one after the other."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return entries


def write_safetensors(path: Path, entries: Any, data_nbytes: int | None = None) -> Path:
    """A file with this header and as much (sparse) data as the header says, or another amount."""
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    if data_nbytes is None:
        data_nbytes = max(
            (e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"), default=0
        )
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data_nbytes)
    return path
