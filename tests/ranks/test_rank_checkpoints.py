"""A checkpoint does not say how many ranks wrote it, nor at which stage."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import offload
from offload.checkpoint.engine.background import BackgroundSave
from offload.checkpoint.engine.shards import PieceAccess
from offload.errors import CheckpointError, PathError, StateError, StorageError
from offload.integrations.transformers.hub_format import stream_weights
from offload.zero.ranks.rank_work import SharedWork
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)
from tests.offload.test_background_saves import compare_drawn, files_of, slow
from tests.ranks.processes import RanksFailed, run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER

States = dict[str, Tensor]


def keys_of(folder: str, stage: int, placement: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config(
        Path(folder), placement, budget=BUDGET, zero={"stage": stage, **more}, precision="bf16",
        optimizer=OPTIMIZER, clip_grad_norm=0.5,
    )  # fmt: skip


def steps(engine: offload.Engine, first: int, last: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses_of(engine, [batches(world_size, seed=n)[rank] for n in range(first, last)])


def train_and_save(folder: str, stage: int, name: str, more: dict[str, Any]) -> States:
    """Two steps, a checkpoint, two more; the states at the checkpoint and at the end."""
    with offload.initialize(seeded(TinyLM), keys_of(folder, stage, NVME, **more)) as engine:
        steps(engine, 0, 2)
        engine.save_checkpoint(Path(folder) / name)
        then = states_of(engine)
        steps(engine, 2, 4)
        return then | {f"end {key}": value for key, value in states_of(engine).items()}


def alone(folder: Path, name: str) -> States:
    with offload.initialize(seeded(TinyLM, seed=5), keys_of(str(folder), 3, HOST)) as engine:
        engine.load_checkpoint(folder / name)
        return states_of(engine)


def at_checkpoint(states: States) -> States:
    return {key: value for key, value in states.items() if not key.startswith("end ")}


def test_replicas_save_what_one_rank_would_have_saved(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = run_ranks(4, tmp_path, train_and_save, folder, 3, "four", {"shard_group": 2})
    assert_same_bits(alone(tmp_path, "four"), at_checkpoint(saved[0]))


def fail_to_save(folder: str) -> list[str]:
    with offload.initialize(seeded(TinyLM), keys_of(folder, 3, HOST)) as engine:
        steps(engine, 0, 1)
        told = []
        (Path(folder) / "file").touch()
        with pytest.raises(StateError, match=r"frozen=, wait=\) has to be the same"):
            engine.save_checkpoint(Path(folder) / "part", frozen=dist.get_rank() == 0)
        for call, path in (
            (engine.save_checkpoint, Path(folder) / "file"),
            (engine.load_checkpoint, Path(folder) / "nowhere"),
        ):
            try:
                call(path)
            except (CheckpointError, PathError) as error:
                told.append(str(error))
        steps(engine, 1, 2)
        with engine.no_sync():
            if dist.get_rank() == 0:
                engine.backward(engine.module.loss(batches(1)[0]))  # type: ignore[operator]
        with pytest.raises((CheckpointError, StateError), match="gradients wait for"):
            engine.save_checkpoint(Path(folder) / "part")
        return told


def test_what_goes_wrong_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, fail_to_save, str(tmp_path))
    assert len(first) == len(second) == 2
    assert "rank 0: " in second[0]


def load_damaged(folder: str, damaged: list[str]) -> list[str]:
    """What is said of damage in each of the files, whichever rank meets it; then no rank trains
    until all have loaded another checkpoint."""
    told = []
    with offload.initialize(seeded(TinyLM), keys_of(folder, 3, HOST)) as engine:
        steps(engine, 0, 1)
        engine.load_checkpoint(Path(folder) / "whole")
        before = states_of(engine)
        for name in damaged:
            try:
                engine.load_checkpoint(Path(folder) / name)
            except CheckpointError as error:
                told.append(str(error))
            try:
                engine.optimizer.step()
            except StateError as error:
                told.append(str(error))
        engine.load_checkpoint(Path(folder) / "whole")
        assert_same_bits(states_of(engine), before)
        steps(engine, 1, 2)
    return told


@pytest.mark.slow
def test_no_rank_trains_with_what_another_rank_found_damaged(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, train_and_save, str(tmp_path), 3, "whole", {})
    files = [Path("parameters/000.safetensors"), Path("optimizer/001.safetensors")]
    for number, file in enumerate(files):
        copy = tmp_path / f"damaged {number}"
        shutil.copytree(tmp_path / "whole", copy)
        content = bytearray((copy / file).read_bytes())
        content[-1] ^= 1
        (copy / file).write_bytes(content)
    for told in run_ranks(2, tmp_path, load_damaged, str(tmp_path), ["damaged 0", "damaged 1"]):
        for text, file in zip(told[::2], files, strict=True):
            assert f"{file} is damaged" in text
        assert ["half-way" in text for text in told[1::2]] == [True, True]


def load_different(folder: str) -> list[str]:
    """What is said where the ranks open different checkpoints, and where it is the same one in two
    places."""
    told, own = [], ["first", "second"][dist.get_rank()]
    copy = ["first", "copy of first"][dist.get_rank()]
    with offload.initialize(seeded(TinyLM), keys_of(folder, 3, HOST)) as engine:
        for number, name in enumerate(("first", "second")):
            steps(engine, number, number + 1)
            engine.save_checkpoint(Path(folder) / name)
        if not dist.get_rank():
            shutil.copytree(Path(folder) / "first", Path(folder) / "copy of first")
        dist.barrier()
        before = states_of(engine)
        try:
            engine.load_checkpoint(Path(folder) / own)
        except CheckpointError as error:
            told.append(str(error))
        assert_same_bits(states_of(engine), before)
        engine.load_checkpoint(Path(folder) / copy)
        steps(engine, 1, 2)
        assert_same_bits(states_of(engine), before)
    return told


def test_ranks_that_open_different_checkpoints_load_none(tmp_path: Path) -> None:
    for told in run_ranks(2, tmp_path, load_different, str(tmp_path)):
        assert len(told) == 1
        assert "different checkpoints (steps taken: 1 on rank 0, 2 on rank 1)" in told[0]


def fail_to_read(folder: str, placement: dict[str, Any]) -> list[str]:
    """Saves of which each rank in turn cannot read one of its parts, at each stage."""
    read, told = PieceAccess.reading, []
    left = 0

    def failing(access: PieceAccess, *piece: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise StorageError(f"{folder}: this part cannot be read")
        return read(access, *piece)

    PieceAccess.reading = failing  # type: ignore[method-assign]
    for stage, culprit, at in ((0, 0, 4), (1, 1, 1), (2, 0, 2), (3, 1, 3), (3, 0, 1)):
        with offload.initialize(seeded(TinyLM), keys_of(folder, stage, placement)) as engine:
            steps(engine, 0, 1)
            path = Path(folder) / f"{stage} {culprit}"

            def save_beside(engine: offload.Engine = engine, path: Path = path) -> None:
                engine.save_checkpoint(path, wait=False)
                steps(engine, 1, 3)
                engine.checkpoint_saved()

            saves = [partial(engine.save_checkpoint, path), save_beside]
            if stage == 3:  # in others the first rank has all weights
                saves.append(partial(stream_weights, engine, lambda *_: None))
            for save in saves:
                left = at if dist.get_rank() == culprit else 0
                with pytest.raises((CheckpointError, StorageError)) as caught:
                    save()
                told.append(f"{type(caught.value).__name__}: {caught.value}")
                assert left <= 0
                assert not path.exists()
            save_beside()
            before = states_of(engine)
            engine.save_checkpoint(path)
            engine.load_checkpoint(path)
            assert_same_bits(states_of(engine), before)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_a_part_that_cannot_be_read_is_an_error_of_the_save_on_all_ranks(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    first, second = run_ranks(2, tmp_path, fail_to_read, str(tmp_path), placement)
    own = f"StorageError: {tmp_path}: this part cannot be read"
    culprits = (0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0)
    for culprit, texts in zip(culprits, zip(first, second, strict=True), strict=True):
        assert texts[culprit] == own
        assert texts[1 - culprit].startswith("CheckpointError: ")
        assert texts[1 - culprit].endswith(f"not saved; rank {culprit}: {own}")


def compare_beside(together: bool, numbers: range, folder: str) -> None:
    if together:  # as on GPUs
        SharedWork._service = lambda _: None  # type: ignore[assignment,method-assign]
    compare_drawn(numbers, folder, ranks=True)


@pytest.mark.parametrize(("size", "first", "together"), [
    (2, 200, False), pytest.param(3, 300, False, marks=pytest.mark.slow), (2, 204, True),
])  # fmt: skip
def test_saves_beside_steps_have_the_bytes_of_their_step(
    tmp_path: Path, size: int, first: int, together: bool, long: bool
) -> None:
    numbers, drawn = range(first, first + (24 if long else 2)), partial(compare_beside, together)
    run_ranks(size, tmp_path, drawn, numbers, str(tmp_path), timeout_s=600 if long else 60)


def train_until_killed(folder: str, culprit: int, left: int) -> None:
    """The culprit is killed somewhere in a save beside the third step."""
    check, path = BackgroundSave._check, Path(folder) / "saved"

    def checked(save: BackgroundSave, nbytes: int) -> None:
        nonlocal left
        left -= dist.get_rank() == culprit
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        check(save, nbytes)

    BackgroundSave._check = checked  # type: ignore[method-assign]
    with slow(), offload.initialize(seeded(TinyLM), keys_of(folder, 3, NVME)) as engine:
        steps(engine, 0, 2)
        engine.save_checkpoint(path)
        engine.save_checkpoint(Path(folder) / "same")
        steps(engine, 2, 3)
        engine.save_checkpoint(path, wait=False)
        steps(engine, 3, 100)


@pytest.mark.parametrize(("culprit", "left"), [(0, 9), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_killed_rank_leaves_the_checkpoint_before(
    tmp_path: Path, culprit: int, left: int
) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, tmp_path, train_until_killed, str(tmp_path), culprit, left)
    assert f"rank {culprit}: died without a word" in str(failed.value)
    assert f"RankError: rank {1 - culprit}: " in str(failed.value)
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "same")
    assert_same_bits(alone(tmp_path, "saved"), alone(tmp_path, "same"))
