"""Files that are written behind their caller: the bytes of a plain write, and errors that come
later."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.checkpoint.engine.pieces import PieceAccess
from offload.checkpoint.format import write_behind
from offload.checkpoint.format.write_behind import (
    BLOCK_NBYTES,
    MOST_BLOCKS,
    WriteBehind,
)
from offload.errors import NoSpaceError, StorageError
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, losses_of, seeded

PAGE = 4096


@pytest.mark.sample(2)
@pytest.mark.parametrize("direct", [True, False])
def test_streams_that_grow_side_by_side_have_the_bytes_of_a_plain_write(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:  # a file system that accepts the flag and refuses the write
        pwrite = os.pwrite

        def refusing(fd: int, data: Any, offset: int) -> int:
            if os.get_blocking(fd) and _is_direct(fd):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", refusing)
    draw = random.Random(0)
    for number in range(6):
        sizes = [
            draw.choice([0, 1, PAGE, draw.randrange(3 * PAGE), draw.randrange(3 * BLOCK_NBYTES)])
            for _ in range(draw.randint(1, 5))
        ]
        parts = [draw.randbytes(size) for size in sizes]
        path = tmp_path / str(number)
        with WriteBehind() as behind:
            file = behind.create(path, sum(sizes))
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            streams = [file.stream(*each) for each in zip(starts, sizes, strict=True)]
            left = {index: memoryview(part) for index, part in enumerate(parts)}
            while left:
                index = draw.choice(list(left))
                count = draw.choice([1, PAGE, draw.randrange(BLOCK_NBYTES)])
                streams[index].append(left[index][:count])
                left[index] = left[index][count:]
                if not left[index]:
                    del left[index]
            file.finish()
            behind.finish()
        assert path.read_bytes() == b"".join(parts)


def _is_direct(fd: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()[1].split()[1]
    return bool(int(flags, 8) & os.O_DIRECT)


def test_what_is_appended_may_change_at_once(tmp_path: Path) -> None:
    data = bytearray(3 * BLOCK_NBYTES)
    with WriteBehind() as behind:
        file = behind.create(tmp_path / "file", 6 * BLOCK_NBYTES)
        stream = file.stream(0, 2 * len(data))
        stream.append(memoryview(data))
        data[:] = b"\1" * len(data)
        stream.append(memoryview(data))
        file.finish()
        behind.finish()
    assert (tmp_path / "file").read_bytes() == bytes(len(data)) + b"\1" * len(data)


def test_an_error_is_raised_by_what_comes_next_and_little_is_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def full(fd: int, data: memoryview, offset: int) -> int:
        asked.append(offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(NoSpaceError, match="free space there"):
        _write_blocks(tmp_path / "file", 100)
    assert asked[0] == 0
    assert len(asked) <= MOST_BLOCKS
    assert set(os.listdir("/proc/self/fd")) == before
    assert not _threads()


def _write_blocks(path: Path, count: int) -> None:
    block = memoryview(bytes(BLOCK_NBYTES))
    with WriteBehind() as behind:
        file = behind.create(path, count * BLOCK_NBYTES)
        stream = file.stream(0, count * BLOCK_NBYTES)
        for _ in range(count):
            stream.append(block)
        file.finish()
        behind.finish()


def _threads() -> list[threading.Thread]:
    names = "offload-write", "offload-sync"
    return [each for each in threading.enumerate() if each.name.startswith(names)]


def test_many_files_are_put_on_the_device_while_others_are_written(tmp_path: Path) -> None:
    with WriteBehind() as behind:
        for number in range(40):
            data = bytes([number]) * 70_000
            file = behind.create(tmp_path / str(number), len(data))
            file.stream(0, len(data)).append(memoryview(data))
            file.finish()
        behind.finish()
    assert not _threads()
    for number in range(40):
        assert (tmp_path / str(number)).read_bytes() == bytes([number]) * 70_000


def test_where_o_direct_is_refused_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = os.open

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(write_behind, "_said", set())
    for number in range(2):
        _write_blocks(tmp_path / str(number), 3)
        assert (tmp_path / str(number)).read_bytes() == bytes(3 * BLOCK_NBYTES)
    assert caplog.text.count("refuses O_DIRECT") == 1


def test_a_save_whose_disk_is_full_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, NVME)) as engine:
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "saved")
        losses = losses_of(engine, batches(1, seed=2))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _failing_with(errno.EIO))
            with pytest.raises(StorageError, match="EIO"):
                engine.save_checkpoint(tmp_path / "saved")
        assert os.listdir(tmp_path) == ["saved"]
        engine.load_checkpoint(tmp_path / "saved")
        assert losses_of(engine, batches(1, seed=2)) == losses


def _failing_with(number: int) -> Any:
    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("placement", [NVME, HOST])
def test_the_next_pieces_are_being_read_while_one_is_used(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    keys = config(tmp_path, placement, optimizer={"chunk": 2048})
    with offload.initialize(seeded(TinyLM), keys) as engine:
        losses_of(engine, batches(1))
        engine.settle()
        states = [record for s in engine.runtime.optimizer_states for record in s.records]
        access, plain = PieceAccess(states), PieceAccess(states)
        access.expect((state, 0) for state in states)
        for state in states:
            with access.reading(state, 0) as ahead, plain.reading(state, 0) as alone:
                assert ahead.equal(alone)
                following = states[states.index(state) + 1 :][:2]
                assert [read.state for read in access._ahead] == following
