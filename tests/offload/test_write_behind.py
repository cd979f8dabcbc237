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
from offload.checkpoint.format.write_behind import (
    BLOCK_NBYTES,
    MOST_BLOCKS,
    Stream,
    WriteBehind,
)
from offload.errors import NoSpaceError, StorageError
from tests.offload.engine_cases import NVME, TinyLM, batches, config, losses_of, seeded

PAGE = 4096


@pytest.mark.slow
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
            streams = [Stream(file, *each) for each in zip(starts, sizes, strict=True)]
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
        stream = Stream(file, 0, count * BLOCK_NBYTES)
        for _ in range(count):
            stream.append(block)
        file.finish()
        behind.finish()


def _threads() -> list[threading.Thread]:
    names = "offload-write", "offload-sync"
    return [each for each in threading.enumerate() if each.name.startswith(names)]


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
