"""Whenever the power goes, what has a final name is whole; what has returned is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload import checkpoint
from offload.checkpoint.foreign.exporting import export, pending_output
from offload.checkpoint.format.manifest import MANIFEST
from offload.checkpoint.format.reader import CheckpointReader
from offload.config import OffloadConfig
from offload.deepspeed.importing import import_checkpoint
from offload.integrations import streamed_folder
from offload.integrations.dcp_export import export_dcp
from offload.integrations.dcp_import import import_dcp
from offload.runs.folder import RunFolder
from tests.deepspeed import zero_files
from tests.faults.power_loss import Disk, write_tree

Verdict = str | None  # what is there whole; None for nothing
Read = Callable[[Path], Verdict]


class PowerLoss:
    """Does something in a folder, and looks at whatever may be left of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "disk"
        self.folder.mkdir()
        self._left = tmp_path / "left"
        self._left.mkdir()
        self._count = 0

    def while_doing(self, action: Callable[[], Any], read: Read) -> set[Verdict]:
        """What `read` finds in what may be left at any moment; it raises for what is torn. At the
        end it finds nothing else than what is there."""
        lost = Disk(self.folder)
        try:
            with lost.recorded():
                action()
            found = set()
            for tree, since in lost.seen.items():
                try:
                    found.add(self._read(tree, read))
                except Exception as error:
                    error.add_note(f"a power loss after: {since}")
                    raise
            assert self._read(lost.durable(), read) == read(self.folder), "it is not durable"
            return found
        finally:
            lost.close()

    def _read(self, tree: Any, read: Read) -> Verdict:
        self._count += 1
        path = self._left / str(self._count)
        write_tree(tree, path)
        return read(path)


@pytest.fixture
def disk_of_its_own(tmp_path: Path) -> PowerLoss:
    return PowerLoss(tmp_path)


@pytest.fixture(scope="module")
def engine() -> Iterator[offload.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    where = {"parameters": "host", "gradients": "host", "optimizer": "host"}
    with offload.initialize(model, {"device": "cpu", "placement": where}) as engine:
        yield engine


def saved(where: str) -> Read:
    """The `state=` of a checkpoint there, every byte of which is compared with its hash."""

    def read(left: Path) -> Verdict:
        if not (left / where).exists():
            return None
        with CheckpointReader(left / where) as reader:
            reader.check(contents=True)
            run = reader.manifest.run
        return str(run.sections["state"] if run is not None else "whole")

    return read


def state(number: int) -> str:
    return str({"number": number})


def test_a_save_and_what_it_replaces(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    path, read = disk_of_its_own.folder / "step-000001", saved("step-000001")
    for number, before in ((1, None), (2, state(1))):
        found = disk_of_its_own.while_doing(
            lambda n=number: engine.save_checkpoint(path, state={"number": n}), read
        )
        assert found == {before, state(number)}


def test_a_save_behind_training(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    def save() -> None:
        engine.save_checkpoint(disk_of_its_own.folder / "a/b", state={"number": 1}, wait=False)
        engine.checkpoint_saved()

    assert disk_of_its_own.while_doing(save, saved("a/b")) == {None, state(1)}


def test_folders_that_are_made_on_the_way(
    disk_of_its_own: PowerLoss, engine: offload.Engine
) -> None:
    path = disk_of_its_own.folder / "new/deep/step-000001"
    found = disk_of_its_own.while_doing(
        lambda: engine.save_checkpoint(path, state={"number": 1}), saved("new/deep/step-000001")
    )
    assert found == {None, state(1)}


def test_a_runs_folder(disk_of_its_own: PowerLoss) -> None:
    run = RunFolder.new(disk_of_its_own.folder / "runs/1")

    def make() -> None:
        run.make()
        run.write_config(OffloadConfig.load({}))

    def read(left: Path) -> Verdict:
        text = left / "runs/1/config.resolved.yaml"
        return text.read_text() if text.exists() else None

    try:
        found = disk_of_its_own.while_doing(make, read)
    finally:
        run.close()
    assert len(found) == 2
    assert (disk_of_its_own.folder / "runs/1/checkpoints").is_dir()


def test_what_is_pruned(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    for number in (1, 2):
        engine.save_checkpoint(disk_of_its_own.folder / f"step-{number:06d}", state={"number": 1})

    def read(left: Path) -> Verdict:
        saved("step-000001")(left)  # is whole or gone
        return saved("step-000002")(left)

    found = disk_of_its_own.while_doing(lambda: checkpoint.prune(disk_of_its_own.folder, 1), read)
    assert found == {state(1)}
    assert not (disk_of_its_own.folder / "step-000001").exists()


# ---------------------------------------------------------------- without an engine
@pytest.fixture
def source(tmp_path: Path, engine: offload.Engine) -> Path:
    engine.save_checkpoint(tmp_path / "source", state={"number": 1})
    return tmp_path / "source"


def contents(where: str) -> Read:
    """A file, or every file of a folder."""

    def read(left: Path) -> Verdict:
        path = left / where
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        return repr([(str(p.relative_to(left)), p.read_bytes()) for p in files]) if files else None

    return read


@dataclass(frozen=True)
class Made:
    """Something that is made of a checkpoint."""

    name: str
    make: Callable[[Path, Path], Any]
    read: Callable[[str], Read] = contents


def of_dcp(source: Path, out: Path) -> None:
    """Beside it, what `dcp.load` reads."""
    import_dcp(source.with_name("dcp"), out)


def with_tokenizer(source: Path, out: Path) -> None:
    folder = source.with_name("tokenizer")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    export(source, out, source=folder)


def sent(where: str) -> Read:
    """At a URL a checkpoint counts once its manifest is there."""

    def read(left: Path) -> Verdict:
        return saved(where)(left) if (left / where / MANIFEST).exists() else None

    return read


MADE = [
    Made("x.safetensors", export),
    Made("exported", export),
    Made("exported", with_tokenizer),
    Made("dcp", export_dcp),
    Made("imported", of_dcp, saved),
    Made("imported.safetensors", of_dcp),
    Made("copies/here", lambda source, out: checkpoint.copy(f"file://{source}", out), saved),
    Made("copies/there", lambda source, out: checkpoint.copy(source, f"file://{out}"), sent),
]


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.name)
def test_what_is_made_of_a_checkpoint(made: Made, disk_of_its_own: PowerLoss, source: Path) -> None:
    if made.make is of_dcp:
        export_dcp(source, source.with_name("dcp"))
    out = disk_of_its_own.folder / made.name
    found = disk_of_its_own.while_doing(lambda: made.make(source, out), made.read(made.name))
    assert len(found) == 2, "nothing or all"
    assert None in found


def test_folders_in_what_is_made(disk_of_its_own: PowerLoss) -> None:
    def make() -> None:
        with pending_output(disk_of_its_own.folder / "out") as pending:
            (pending / "a/b").mkdir(parents=True)
            (pending / "a/b/x").write_text("x")
            (pending / "a/empty").touch()

    assert len(disk_of_its_own.while_doing(make, contents("out"))) == 2


# ---------------------------------------------------------------- of other frameworks
def test_a_checkpoint_that_is_taken_over_from_deepspeed(
    disk_of_its_own: PowerLoss, tmp_path: Path
) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    zero_files.write(tmp_path / "theirs/x", net, optimizer, 2, 1, epoch=1)
    out = disk_of_its_own.folder / "new/ours"
    found = disk_of_its_own.while_doing(
        lambda: import_checkpoint(tmp_path / "theirs", out), saved("new/ours/x")
    )
    assert len(found) == 2
    assert (out / "latest").read_text() == "x"


@pytest.fixture(scope="module")
def loop() -> Iterator[Any]:
    model = nn.Linear(3, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    yield engine
    engine.destroy()


def test_a_tag_that_is_saved_again(disk_of_its_own: PowerLoss, loop: Any) -> None:
    """As DeepSpeed's engine saves it; what is loaded is the loop's state, too."""

    def read(left: Path) -> Verdict:
        saved("run/best")(left)
        path, client = loop.load_checkpoint(left / "run")
        if path is None:
            return None
        assert client is not None
        return str(client["number"])

    def save(number: int) -> None:
        loop.save_checkpoint(
            disk_of_its_own.folder / "run", tag="best", client_state={"number": number}
        )

    assert disk_of_its_own.while_doing(lambda: save(1), read) == {None, "1"}
    assert disk_of_its_own.while_doing(lambda: save(2), read) == {"1", "2"}


def test_weights_that_deepspeed_saves(disk_of_its_own: PowerLoss, loop: Any) -> None:
    def read(left: Path) -> Verdict:
        path = left / "new/model.safetensors"
        if not path.exists():
            return None
        from safetensors.torch import load_file

        return str(load_file(path)["bias"].tolist())

    def save() -> None:
        loop.save_16bit_model(disk_of_its_own.folder / "new", "model.safetensors")

    assert len(disk_of_its_own.while_doing(save, read)) == 2
    with deepspeed.zero.GatheredParameters(loop.module.bias, modifier_rank=0):
        loop.module.bias.data.add_(1.0)
    assert len(disk_of_its_own.while_doing(save, read)) == 2
    assert [path.name for path in (disk_of_its_own.folder / "new").iterdir()] == [
        "model.safetensors"
    ]


def test_a_folder_of_lightning(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    def read(left: Path) -> Verdict:
        if not streamed_folder.is_streamed(left / "runs/last.ckpt"):
            return None
        state, states = streamed_folder.read(
            left / "runs/last.ckpt", lambda path: streamed_folder.load_state(path, trust=False)
        )
        saved(states.name)(states.parent)
        return str(state["epoch"])

    def save(epoch: int) -> None:
        streamed_folder.save(
            engine, disk_of_its_own.folder / "runs/last.ckpt", {"epoch": epoch}, str, writes=True
        )

    assert disk_of_its_own.while_doing(lambda: save(1), read) == {None, "1"}
    assert disk_of_its_own.while_doing(lambda: save(2), read) == {"1", "2"}


def test_shards_and_their_index(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    weight_files = pytest.importorskip("offload.integrations.weight_files")
    out = disk_of_its_own.folder

    def read(left: Path) -> Verdict:
        if not (left / "model.safetensors.index.json").exists():
            return None
        names = set(
            json.loads((left / "model.safetensors.index.json").read_text())["weight_map"].values()
        )
        return str(sorted(name for name in names if read_file(left / name)))

    def read_file(path: Path) -> Any:
        from safetensors.torch import load_file

        return load_file(path)

    def save() -> None:
        weight_files.write_shards(weight_files.OwnNames(engine), out, 40)

    found = disk_of_its_own.while_doing(save, read)
    assert len(found) == 2
    assert disk_of_its_own.while_doing(save, read) == found - {None}
