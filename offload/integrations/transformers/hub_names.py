"""Names of models on a hub, given where a local folder is required."""

import re
from pathlib import PurePath

_HUB_NAME = re.compile(r"[\w.-]*\w/?[\w.-]*\w", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Whether it may name a model on a hub, such as `meta-llama/Llama-3.1-8B` or `gpt2`."""
    return _HUB_NAME.fullmatch(name) is not None


def not_local(name: str) -> str:
    """Return the error for `name`, which is no folder here, with a command to download it."""
    wanted, folder = ("ID", "FOLDER")
    if is_hub_name(name):
        wanted, folder = name, PurePath(name).name
    return (
        f"{name} is not a local folder, and offload does not download models; run "
        f"`hf download {wanted} --local-dir {folder}` and name the folder"
    )
