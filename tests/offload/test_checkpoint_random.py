"""A manifest that was changed at random, with the right hash, loads or is refused: by every reader,
with a typed error."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings

import offload
from offload.checkpoint.foreign.exporting import export
from offload.checkpoint.format.reader import CheckpointReader
from offload.cli.checkpoint import inspect, verify
from offload.cli.errors import guarded
from offload.errors import OffloadError
from tests.offload.engine_cases import TinyLM, batches, seeded
from tests.offload.engine_states import losses_of
from tests.offload.json_changes import changed, changes
from tests.offload.test_checkpoint_forged import in_time, keys_of, signed


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    keys = keys_of(tmp_path_factory.mktemp("swap"))
    with offload.initialize(seeded(TinyLM, 5), keys) as engine:
        losses_of(engine, batches(1))
        yield engine


@pytest.fixture(scope="module")
def saved(engine: offload.Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-000001"
    engine.save_checkpoint(folder)
    return folder


def ends_well(command: Callable[[Path], None], path: Path, capsys: Any) -> None:
    """With an exit code, and nothing on the terminal that moves its cursor."""
    with suppress(typer.Exit):
        guarded(lambda: command(path), debug=False)
    said = capsys.readouterr()
    assert len(said.err) < 20_000
    assert all(c.isprintable() or c == "\n" for c in said.out + said.err)


@pytest.mark.slow
def test_manifests_at_random(
    engine: offload.Engine, saved: Path, tmp_path: Path, long: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original = json.loads((saved / "manifest.json").read_text())
    del original["xxh3"]
    path = Path(shutil.copytree(saved, tmp_path / "step-000001"))
    counts, longest = {"loaded": 0, "refused": 0}, [0]

    @settings(
        max_examples=600 if long else 50, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(changes())
    def check(made: Any) -> None:
        content = changed(copy.deepcopy(original), made)
        (path / "manifest.json").write_text(signed(content) if isinstance(content, dict) else "[]")
        with in_time():
            try:
                engine.load_checkpoint(path)
                counts["loaded"] += 1
            except OffloadError as error:
                counts["refused"] += 1
                longest[0] = max(longest[0], len(str(error)))
            ends_well(inspect, path, capsys)
            ends_well(verify, path, capsys)
            out = tmp_path / "out"
            try:
                export(path, out)
                shutil.rmtree(out)
            except OffloadError:
                assert not out.exists()

    check()
    assert min(counts.values()) > 0, counts
    assert longest[0] < 5000
    engine.load_checkpoint(saved)


@pytest.mark.parametrize(
    "text", ["[/x]", "[bold]", "\x1b[2J", "a\nb", "\ud800", "\u202e", "x" * 9000]
)
def test_no_text_of_a_manifest_moves_the_cursor(
    text: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "saved"))
    content = json.loads((path / "manifest.json").read_text())
    del content["xxh3"]
    content["groups"][0]["name"] = content["optimizer"]["type"] = content["offload"] = text
    content["optimizer"]["param_groups"][0]["numbers"] |= {"note": text, text: 1}
    (path / "manifest.json").write_text(signed(content))
    ends_well(inspect, path, capsys)
    content["buffers"] = [{"name": text, "dtype": text, "shape": []}]
    (path / "manifest.json").write_text(signed(content))
    ends_well(verify, path, capsys)


def test_the_readers_of_what_is_not_changed_succeed(saved: Path) -> None:
    with CheckpointReader(saved) as reader:
        assert list(reader.problems(contents=True)) == []
