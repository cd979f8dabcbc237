"""A model's folder with a configuration, an index or a header that was changed at random opens, or
is refused with a typed error."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import offload
from offload.errors import ConfigError, OffloadError
from tests.offload.json_changes import changed, changes
from tests.offload.test_checkpoint_forged import in_time
from tests.outside.trainer_cases import tiny_llama

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model", max_shard_size=8000)
    return tmp_path / "model"


def opened(folder: Path) -> bool:
    with in_time():
        try:
            offload.open_pretrained(folder)
        except OffloadError as error:
            if "\n" in str(error) and "LOAD REPORT" not in str(error):  # transformers' own table
                raise AssertionError("more than a line") from error
            return False
    return True


@pytest.mark.sample("config.json", "header")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "header"])
def test_json_at_random(name: str, folder: Path, long: bool) -> None:
    path = next(folder.glob("*.safetensors")) if name == "header" else folder / name
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text, data = (raw[8 : 8 + length], raw[8 + length :]) if name == "header" else (raw, b"")
    original = json.loads(text)
    counts = {True: 0, False: 0}

    @settings(
        max_examples=1000 if long else 30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(changes())
    def check(made: Any) -> None:
        text = json.dumps(changed(copy.deepcopy(original), made)).encode()
        header = len(text).to_bytes(8, "little") if name == "header" else b""
        path.write_bytes(header + text + data)
        counts[opened(folder)] += 1

    check()
    assert counts[False] > 0 or name == "generation_config.json"  # of which little is needed


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "n_layer", "encoder_layers", "num_local_experts", "depths"]
)
def test_layers_that_no_file_has_tensors_for_are_not_made(key: str, folder: Path) -> None:
    """Each would be an object of some kilobytes, before its weights are missing."""
    config = json.loads((folder / "config.json").read_text())
    config["sub"] = {key: [2, 10**8]} if key == "depths" else {key: 10**8}
    (folder / "config.json").write_text(json.dumps(config))
    with in_time(), pytest.raises(ConfigError, match=f"{key} is 100000000, and the files have"):
        offload.open_pretrained(folder)
