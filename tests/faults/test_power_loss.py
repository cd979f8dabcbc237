"""Whenever the power goes, what has a final name is whole; what has returned is there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload import checkpoint
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import state_in
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
            verdicts = set()
            for tree, since in lost.seen.items():
                try:
                    verdicts.add(self._read(tree, read))
                except Exception as error:
                    error.add_note(f"a power loss after: {since}")
                    raise
            assert self._read(lost.durable(), read) == read(self.folder), "it is not durable"
            return verdicts
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
            return str(state_in(reader) if reader.manifest.run is not None else "whole")

    return read


def state(number: int) -> str:
    return str({"number": number})


def test_a_save_and_what_it_replaces(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    path, read = disk_of_its_own.folder / "step-000001", saved("step-000001")
    for number, before in ((1, None), (2, state(1))):
        verdicts = disk_of_its_own.while_doing(
            lambda n=number: engine.save_checkpoint(path, state={"number": n}), read
        )
        assert verdicts == {before, state(number)}


def test_a_save_behind_training(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    def save() -> None:
        engine.save_checkpoint(disk_of_its_own.folder / "a/b", state={"number": 1}, wait=False)
        engine.checkpoint_saved()

    assert disk_of_its_own.while_doing(save, saved("a/b")) == {None, state(1)}


def test_folders_that_are_made_on_the_way(
    disk_of_its_own: PowerLoss, engine: offload.Engine
) -> None:
    path = disk_of_its_own.folder / "new/deep/step-000001"
    verdicts = disk_of_its_own.while_doing(
        lambda: engine.save_checkpoint(path, state={"number": 1}), saved("new/deep/step-000001")
    )
    assert verdicts == {None, state(1)}


def test_what_is_pruned(disk_of_its_own: PowerLoss, engine: offload.Engine) -> None:
    for number in (1, 2):
        engine.save_checkpoint(disk_of_its_own.folder / f"step-{number:06d}", state={"number": 1})

    def read(left: Path) -> Verdict:
        saved("step-000001")(left)  # is whole or gone
        return saved("step-000002")(left)

    seen = disk_of_its_own.while_doing(lambda: checkpoint.prune(disk_of_its_own.folder, 1), read)
    assert seen == {state(1)}
    assert not (disk_of_its_own.folder / "step-000001").exists()


# ---------------------------------------------------------------- of other frameworks
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
    """A save as DeepSpeed's engine makes it; the loop's state is loaded, too."""

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
