"""Names in a model's folder may be anybody's: nothing outside of it is read, and what is damaged is
named."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload
from offload.checkpoint.foreign.model_files import carry
from offload.errors import CheckpointError
from tests.offload.engine_cases import HOST, assert_same_bits, config
from tests.outside.trainer_cases import tiny_llama, values_of

loading = pytest.importorskip("offload.integrations.transformers.pretrained")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    keys = config(tmp_path_factory.mktemp("swap"), HOST)
    model = tiny_llama()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    with offload.initialize(model, keys) as engine:
        yield engine


def index(folder: Path, *files: Any) -> None:
    """Instead of the one file."""
    (folder / FILE).unlink(missing_ok=True)
    weight_map = {f"tensor {number}": file for number, file in enumerate(files)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def outside(folder: Path) -> Path:
    """A whole file that could be read."""
    elsewhere = folder.parent / "elsewhere.safetensors"
    (folder / FILE).rename(elsewhere)
    return elsewhere


def raw(folder: Path, text: bytes) -> None:
    (folder / FILE).unlink()
    (folder / INDEX).write_bytes(text)


def header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another header, of any length, before the same data."""
    content = (folder / FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    changed = change(entries)
    text = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(e for name, e in entries.items() if name != "__metadata__")


def by_a_link(folder: Path) -> None:
    (folder / "shard.safetensors").symlink_to(outside(folder))
    index(folder, "shard.safetensors")


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "shard.safetensors")
    index(folder, "shard.safetensors")


def in_two_files(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    name = next(iter(tensors))
    save_file(tensors, folder / "a.safetensors")
    save_file({name: tensors[name]}, folder / "b.safetensors")
    index(folder, "a.safetensors", "b.safetensors")


def cut_short(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])


def with_more_behind(folder: Path) -> None:
    with (folder / FILE).open("ab") as file:
        file.write(b"more")


def with_a_huge_header(folder: Path) -> None:
    (folder / FILE).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def one_name_twice(folder: Path) -> None:
    def again(entries: dict[str, Any]) -> bytes:
        names = [name for name in entries if name != "__metadata__"]
        text = json.dumps(entries)
        return text.replace(json.dumps(names[0]), json.dumps(names[1]), 1).encode()

    header(folder, again)


def overlapping(folder: Path) -> None:
    def change(entries: dict[str, Any]) -> None:
        alike = [e for n, e in entries.items() if n.endswith("_layernorm.weight")]
        alike[0]["data_offsets"] = alike[1]["data_offsets"]

    header(folder, change)


def first_is(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: header(folder, lambda entries: first(entries).update({key: value}))


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "..": (
        lambda f: index(f, f"../{outside(f).name}"), r"\.\./elsewhere.*outside of its folder",
    ),
    "absolute": (lambda f: index(f, str(outside(f))), "outside of its folder"),
    "link": (by_a_link, r"shard\.safetensors leads to .*/elsewhere.* outside of its folder"),
    "link of the only file": (
        lambda f: (f / FILE).symlink_to(outside(f)), "leads to .* outside of its folder",
    ),
    "missing": (lambda f: index(f, "x.safetensors"), r"'x\.safetensors'.* get the whole folder"),
    "pipe": (a_pipe, "no such file"),
    "NUL": (lambda f: index(f, "a\0b"), r"a\\x00b"),
    "no text": (lambda f: raw(f, b"\xff\xfe"), r"index\.json is damaged: .*get the folder again"),
    "deep": (lambda f: raw(f, b"[" * 200_000), r"index\.json is damaged"),
    "no map": (lambda f: raw(f, b"{}"), "no weight_map"),
    "no safetensors": (lambda f: index(f, "config.json"), r"config\.json is no safetensors file"),
    "in two files": (in_two_files, r"is in .*a\.safetensors and in .*b\.safetensors"),
    "cut short": (cut_short, "damaged header"),
    "more behind": (with_more_behind, r"describes \d+ bytes, and the file has \d+"),
    "huge header": (with_a_huge_header, "its header would be 4611686018427387904 bytes"),
    "one name twice": (one_name_twice, "damaged header .*lies at"),
    "overlapping": (overlapping, "damaged header .*lies at"),
    "unknown dtype": (first_is("dtype", "F6_E2M3"), "dtype F6_E2M3, which is not known"),
    "negative": (first_is("shape", [-1, 4]), "damaged header"),
    "far too large": (first_is("shape", [1 << 62, 1 << 62]), "damaged header"),
    "no place": (first_is("data_offsets", None), "damaged header"),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_what_is_damaged_or_elsewhere_is_refused(case: str, folder: Path) -> None:
    change, message = CASES[case]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        offload.open_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_configuration_names_no_file_elsewhere(folder: Path) -> None:
    elsewhere = outside(folder)
    settings = json.loads((folder / "config.json").read_text())
    for name in (f"../{elsewhere.name}", str(elsewhere)):
        settings["transformers_weights"] = name
        (folder / "config.json").write_text(json.dumps(settings))
        with pytest.raises(CheckpointError, match="outside of its folder"):
            offload.open_pretrained(folder)


def in_a_folder_of_its_own(folder: Path) -> Path:
    (folder / "sub").mkdir()
    (folder / FILE).rename(folder / "sub/shard.safetensors")
    index(folder, "sub/shard.safetensors")
    return folder


def by_a_link_within(folder: Path) -> Path:
    (folder / FILE).rename(folder / "real")
    (folder / FILE).symlink_to("real")
    return folder


def by_a_link_to_all_of_it(folder: Path) -> Path:
    (folder.parent / "link").symlink_to(folder)
    return folder.parent / "link"


def in_a_cache_of_the_hub(folder: Path) -> Path:
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize(
    "move",
    [in_a_folder_of_its_own, by_a_link_within, by_a_link_to_all_of_it, in_a_cache_of_the_hub],
)
def test_files_of_the_folder_are_read_wherever_they_are(
    move: Callable[[Path], Path], folder: Path, engine: offload.Engine
) -> None:
    moved = move(folder)
    assert_same_bits(
        {n: p.detach().value() for n, p in offload.open_pretrained(moved).named_parameters()},  # type: ignore[operator]
        dict(tiny_llama().named_parameters()),
    )
    loading.load_weights(engine, moved)
    assert_same_bits(values_of(engine.module), values_of(tiny_llama()))
    with torch.no_grad(), engine.gathered():
        for param in engine.module.parameters():
            param.add_(1)


def test_an_export_carries_no_file_from_elsewhere(folder: Path) -> None:
    (folder.parent / "secret").write_text("key")
    (folder / "tokenizer.json").symlink_to(folder.parent / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json leads to .*secret"):
        carry(folder, folder)
