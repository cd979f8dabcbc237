"""A checkpoint goes to an object store and back, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

import offload
from offload import checkpoint
from offload.checkpoint.format.manifest import MANIFEST
from offload.cli import main
from offload.errors import CheckpointError, PathError, StorageError
from tests.offload.engine_cases import (
    TinyLM,
    assert_same_bits,
    config,
    seeded,
    states_of,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[offload.Engine]:
    with offload.initialize(seeded(TinyLM), config(tmp_path)) as engine:
        engine.save_checkpoint(tmp_path / "saved/step-000003", state={"epoch": 1})
        yield engine


@pytest.fixture(params=["memory", "file"])
def url(request: Any, tmp_path: Path) -> Iterator[str]:
    yield "memory://bucket/step-000003" if request.param == "memory" else f"file://{tmp_path}/there"
    fsspec.filesystem("memory").store.clear()


def test_what_comes_back_is_what_was_saved(
    engine: offload.Engine, url: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved/step-000003"
    nbytes = checkpoint.copy(saved, url)
    assert checkpoint.copy(url, tmp_path / "back/step-000003") == nbytes > 0
    found = {p.relative_to(saved): p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    back = tmp_path / "back/step-000003"
    assert found == {p.relative_to(back): p.read_bytes() for p in back.rglob("*") if p.is_file()}
    expected = states_of(engine)
    assert engine.load_checkpoint(back) == {"epoch": 1}
    assert_same_bits(states_of(engine), expected)
    with pytest.raises(PathError, match="has a checkpoint, which is not replaced"):
        checkpoint.copy(saved, url)


def test_nothing_counts_before_the_manifest(
    engine: offload.Engine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, root = fsspec.core.url_to_fs(url)
    put, calls = type(files).put_file, 0

    def failing(self: Any, *args: Any, **keys: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ConnectionError("gone")
        return put(self, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(type(files), "put_file", failing)
        with pytest.raises(StorageError, match="ConnectionError: gone"):
            checkpoint.copy(tmp_path / "saved/step-000003", url)
    assert not files.exists(f"{root}/{MANIFEST}")
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        checkpoint.copy(url, tmp_path / "back")
    checkpoint.copy(tmp_path / "saved/step-000003", url)  # over what was left
    checkpoint.copy(url, tmp_path / "back")


@pytest.mark.parametrize("damage", ["flipped", "longer", "shorter", "missing", "manifest"])
def test_damage_is_met_before_a_copy_counts(
    damage: str, engine: offload.Engine, url: str, tmp_path: Path
) -> None:
    checkpoint.copy(tmp_path / "saved/step-000003", url)
    files, root = fsspec.core.url_to_fs(url)
    name = f"{root}/{MANIFEST if damage == 'manifest' else 'parameters/000.safetensors'}"
    raw = bytearray(files.cat_file(name))
    raw[len(raw) // 2] ^= damage in ("flipped", "manifest")
    files.rm(name)
    if damage != "missing":
        keep = len(raw) - 1 if damage == "shorter" else len(raw)
        files.pipe_file(name, bytes(raw[:keep]) + b"x" * (damage == "longer"))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises((CheckpointError, StorageError)):
        checkpoint.copy(url, tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == before


def test_damage_is_met_before_anything_is_sent(engine: offload.Engine, tmp_path: Path) -> None:
    file = tmp_path / "saved/step-000003/parameters/000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError):
        checkpoint.copy(tmp_path / "saved/step-000003", "memory://bucket/it")
    assert not fsspec.filesystem("memory").store


def test_places_are_named_right(engine: offload.Engine, tmp_path: Path, capsys: Any) -> None:
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(PathError, match=r"s3://bucket/it: .*offload checkpoint copy FROM"):
            call("s3://bucket/it")
        with pytest.raises(PathError, match="offload checkpoint copy FROM"):
            call(Path("s3://bucket/it"))
    assert not Path("s3:").exists()
    with pytest.raises(PathError, match="one of both has to be a folder here"):
        checkpoint.copy(tmp_path / "saved/step-000003", tmp_path / "other")
    with pytest.raises(PathError, match="nowhere://"):
        checkpoint.copy(tmp_path / "saved/step-000003", "nowhere://it")
    target = f"file://{tmp_path}/there"
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "copy", str(tmp_path / "saved/step-000003"), target])
    assert ended.value.code == 0
    assert f"to {target} (" in capsys.readouterr().out
