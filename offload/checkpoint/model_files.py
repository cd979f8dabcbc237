"""The files of a model's folder in Hugging Face's layout: how tensors are cut into shards, their
index, and what lies beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint.disk import storage_errors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SHARD_NBYTES = 5 * 10**9
# Of tokenizers and processors: what they were made from, too.
_CARRIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.tiktoken", "*.model", "*preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def cut(sizes: Mapping[str, int], most_nbytes: int = SHARD_NBYTES) -> dict[str, list[str]]:
    """File name -> tensors, of `sizes` (name -> bytes): in their order, and as huggingface_hub cuts
    them. A tensor that is larger than a shard has one of its own."""
    shards: list[list[str]] = []
    held: list[str] = []
    held_nbytes = 0
    for name, nbytes in sizes.items():
        if nbytes > most_nbytes:
            shards.append([name])
            continue
        if held_nbytes + nbytes > most_nbytes:
            shards.append(held)
            held, held_nbytes = [], 0
        held.append(name)
        held_nbytes += nbytes
    if held:
        shards.append(held)
    if len(shards) <= 1:
        return dict(zip([SINGLE], shards, strict=False))
    stem, count = SINGLE.removesuffix(".safetensors"), len(shards)
    return {
        f"{stem}-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def index_text(files: Mapping[str, Iterable[str]], total_nbytes: int) -> str:
    """The index of shards."""
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {
        "metadata": {"total_size": total_nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with storage_errors("writing", path):
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def carried_files(folder: Path) -> list[Path]:
    """What of a model's folder belongs to its tokenizer or processor."""
    found = {path for pattern in _CARRIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.suffix not in (".safetensors", ".bin"))


def carry(files: Iterable[Path], into: Path) -> list[str]:
    """Copy files; their names."""
    names = []
    for path in files:
        with storage_errors("copying", path):
            shutil.copyfile(path, into / path.name)  # of a link, what it leads to
        names.append(path.name)
    return names
