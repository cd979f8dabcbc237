"""The files of a model's folder in Hugging Face's layout: those of its weights, which an index
names, and those beside them."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.format.disk import storage_errors
from offload.process import bounded_json
from offload.tiers.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# Of tokenizers and processors: what they were made from, too.
_CARRIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.tiktoken", "*.model", "*preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def weight_files(folder: Path, names: Sequence[str] = (SINGLE, INDEX)) -> list[Path]:
    """The files of a folder's weights: the first of `names` that is there, or, if that is an index,
    the files that it names. An empty list if none is there.

    CheckpointError for an index that is damaged, or names what is missing or lies elsewhere.
    """
    for name in names:
        if not os.path.isfile(folder / name):
            continue
        path = own_file(folder, name)
        if not name.endswith(".json"):
            return [path]
        weight_map = read_json(path).get("weight_map")
        named = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not named or not all(isinstance(each, str) for each in named):
            raise CheckpointError(f"{path} is damaged: it has no weight_map; get the folder again")
        shards = sorted(set(named))
        for shard in shards:
            if not os.path.isfile(folder / shard):  # a pipe, say: to open it would wait
                raise CheckpointError(
                    f"{path} names {shard!r}, and there is no such file; get the whole folder"
                )
        return [own_file(folder, shard) for shard in shards]
    return []


def own_file(folder: Path, name: str) -> Path:
    """The path of an existing file. CheckpointError if it is a link that leads out of the folder,
    except in a hub's cache: files of a folder in `snapshots`, and of a pipeline's models in that,
    are links to the `blobs` beside it."""
    home, path = Path(os.path.realpath(folder)), folder / name
    real = Path(os.path.realpath(path))
    snapshots = [each for each in home.parents[:2] if each.name == "snapshots"]
    blobs = snapshots[0].parent / "blobs" if snapshots else home
    if real.is_relative_to(home) or real.parent == blobs:
        return path
    raise CheckpointError(
        f"{path} leads to {real}, outside of its folder, and nothing else is read; if you "
        "trust it, put that file into the folder"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of bounded size. CheckpointError for anything else, and for a link
    that leads out of the file's folder."""
    try:
        with storage_errors("reading", path):
            content = bounded_json.read(own_file(path.parent, path.name))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; get the folder again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object; get the folder again")
    return content


def carry(folder: Path, into: Path) -> list[str]:
    """Copy the files of a model's folder for its tokenizer or processor; return their names.
    CheckpointError for a link that leads elsewhere: what is exported may be published."""
    files = {path for pattern in _CARRIED for path in folder.glob(pattern) if path.is_file()}
    names = sorted(each.name for each in files if each.suffix not in (".safetensors", ".bin"))
    for path in [own_file(folder, name) for name in names]:
        with storage_errors("copying", path):
            shutil.copyfile(path, into / path.name)  # of a link, what it leads to
    return names
