"""Model files for tests: written here, byte for byte, so that they can be wrong in every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
