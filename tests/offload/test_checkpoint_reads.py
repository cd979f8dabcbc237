"""What a load uses is what it has compared with a hash: reads that fail, lie or come from another
place, file, save or format."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload.checkpoint.format import checked_files, manifest
from offload.checkpoint.format.manifest import FileRecord, Manifest
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.safetensors_file import SafetensorsWriter, TensorInfo
from offload.errors import CheckpointError, StorageError
from offload.process import bounded_json
from tests.offload.engine_cases import HOST, TinyLM, batches, config, flip_bit, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of

preadv = os.preadv
Change = Callable[[Any], int]


def keys_of(folder: Path) -> dict[str, Any]:
    return config(folder, HOST, precision="bf16")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """Checkpoints of two steps of one run, and the states of the second."""
    folder = tmp_path_factory.mktemp("originals")
    with offload.initialize(seeded(TinyLM), keys_of(folder)) as engine:
        for step in (1, 2):
            losses_of(engine, batches(1, seed=step))
            engine.save_checkpoint(folder / f"step-{step}")
        yield folder, states_of(engine)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    with offload.initialize(seeded(TinyLM, 5), keys_of(tmp_path_factory.mktemp("swap"))) as engine:
        yield engine


@pytest.fixture
def saved(originals: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals[0] / "step-2", tmp_path / "step-2"))


def flipped(arguments: Any) -> int:
    count = preadv(*arguments)
    arguments[1][0][count // 2] ^= 4
    return count


def failed(arguments: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def loaded(engine: offload.Engine, path: Path, fault: Change, wrong: range) -> tuple[int, int]:
    """Load with a fault in the reads `wrong`; reads and bytes."""
    reads = nbytes = 0

    def read(*arguments: Any) -> int:
        nonlocal reads, nbytes
        reads += 1
        count = fault(arguments) if reads - 1 in wrong else preadv(*arguments)
        nbytes += count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        engine.load_checkpoint(path)
    return reads, nbytes


def signed(path: Path, content: dict[str, Any]) -> None:
    content.pop("xxh3", None)
    text = json.dumps({**content, "xxh3": manifest._digest(content)})
    (path / "manifest.json").write_text(text)


def test_a_load_reads_every_byte_once(engine: offload.Engine, saved: Path) -> None:
    _, nbytes = loaded(engine, saved, failed, range(0))
    assert nbytes == sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())


@pytest.mark.parametrize("fault", [flipped, failed])
def test_a_read_that_fails_is_an_error_and_nothing_trains(
    originals: tuple[Path, Any], engine: offload.Engine, saved: Path, fault: Change
) -> None:
    reads, _ = loaded(engine, saved, fault, range(0))
    for number in range(0, reads, 13):
        with pytest.raises((CheckpointError, StorageError), match=r"damaged|EIO"):
            loaded(engine, saved, fault, range(number, number + 1))
        engine.load_checkpoint(saved)
    assert_same_bits(states_of(engine), originals[1])


def data_problems(reader: CheckpointReader, name: str) -> list[str]:
    return list(reader._files.problems(name, lambda nbytes: None))


def test_random_flips_in_all_files_are_found(saved: Path, long: bool) -> None:
    draw = random.Random(0)
    with CheckpointReader(saved) as reader:
        sizes = {name: file.nbytes for name, file in reader.manifest.files.items()}
        for _ in range(10_000 if long else 200):
            (name,) = draw.choices([*sizes], [*sizes.values()])
            offset = draw.randrange(sizes[name])
            with (saved / name).open("r+b", buffering=0) as file:
                (byte,) = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([byte ^ (1 << draw.randrange(8))]), offset)
                assert len(data_problems(reader, name)) == 1, (name, offset)
                os.pwrite(file.fileno(), bytes([byte]), offset)


def test_every_flipped_byte_of_a_manifest_is_found(saved: Path, long: bool) -> None:
    raw = bytearray((saved / "manifest.json").read_bytes())
    whole = Manifest.from_json(raw, "it")
    for offset in range(0, len(raw), 1 if long else 97):
        bit = 1 << offset % 8
        raw[offset] ^= bit
        with suppress(CheckpointError):  # else 1e-8 and 1E-8 are the same number
            assert Manifest.from_json(raw, "it") == whole, offset
        raw[offset] ^= bit


def test_every_truncation_is_found(saved: Path, long: bool) -> None:
    for file in sorted(saved.rglob("*.*")):
        raw = file.read_bytes()
        lengths = range(len(raw)) if long and len(raw) < 5000 else range(0, len(raw), 2503)
        for length in lengths:
            os.truncate(file, length)
            with pytest.raises(CheckpointError), CheckpointReader(saved) as reader:
                reader.check(contents=False)
        file.write_bytes(raw)


def test_a_hash_is_bound_to_save_file_and_offset() -> None:
    data = memoryview(b"the same bytes")
    places = [("1/a", 0), ("1/a", checked_files.BLOCK_NBYTES), ("1/b", 0), ("2/a", 0)]
    hashes = {checked_files.block_hash(*place, data).hexdigest() for place in places}
    assert len(hashes) == len(places)


def big_file(path: Path, bound_to: str) -> FileRecord:
    """Two sections of three blocks, one of them written in many pieces."""
    path.mkdir(parents=True)
    numel = 2 * checked_files.BLOCK_NBYTES + 100
    sections = [[TensorInfo(name, "U8", (numel,))] for name in "ab"]
    values = torch.randint(256, (2, numel), dtype=torch.uint8).numpy()
    file = SafetensorsWriter(path / "000.safetensors", sections, {}, bound_to)
    file.append("a", values[0].data)
    for start in range(0, numel, 300_001):
        file.append("b", values[1][start : start + 300_001].data)
    return file.finish()


def test_swapped_blocks_are_found_and_parts_are_read_right(saved: Path) -> None:
    content = json.loads((saved / "manifest.json").read_text())
    name = "parameters/999.safetensors"
    record = big_file(saved / "new", f"{content['generation']}/{name}")
    file = (saved / "new/000.safetensors").rename(saved / name)
    content["files"][name] = record.model_dump()
    signed(saved, content)
    raw = file.read_bytes()
    draw = random.Random(1)
    with CheckpointReader(saved) as reader:
        assert data_problems(reader, name) == []
        tensors = reader._header(name)
        for _ in range(30):
            tensor = tensors[draw.choice("ab")]
            start = draw.randrange(tensor.info.nbytes)
            buffer = memoryview(bytearray(draw.randrange(tensor.info.nbytes - start + 1)))
            reader.read_into(tensor, start, buffer)
            begin = tensor.offset_bytes + start
            assert buffer == raw[begin : begin + len(buffer)]
        header, size = record.sections[0].nbytes, checked_files.BLOCK_NBYTES
        first, second = slice(header, header + size), slice(header + size, header + 2 * size)
        swapped = bytearray(raw)
        swapped[first], swapped[second] = raw[second], raw[first]
        file.write_bytes(swapped)
        (problem,) = data_problems(reader, name)
        assert f"a (2.0 MiB at byte {header}) has XXH3" in problem


def test_what_is_of_another_save_is_found(originals: tuple[Path, Any], saved: Path) -> None:
    first = originals[0] / "step-1"
    content, older = (
        json.loads((path / "manifest.json").read_text()) for path in (saved, first)
    )  # fmt: skip
    names = [name for name in content["files"] if content["files"][name] != older["files"][name]]
    assert names == [*content["files"]]
    for name in names:
        raw = (saved / name).read_bytes()
        if raw == (first / name).read_bytes():
            continue  # nothing was trained in it
        shutil.copy(first / name, saved / name)
        with CheckpointReader(saved) as reader:
            assert data_problems(reader, name)
        (saved / name).write_bytes(raw)

    # files and their hashes, put together with the other manifest
    shutil.copytree(first, saved, dirs_exist_ok=True, ignore=lambda *_: ["manifest.json"])
    signed(saved, {**content, "files": older["files"]})
    with CheckpointReader(saved) as reader:
        assert all(data_problems(reader, name) for name in names)


def weights_in(keys: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    with offload.initialize(seeded(TinyLM, 3), keys, weights=path) as engine, engine.gathered():
        return {name: t.clone() for name, t in engine.module.state_dict().items()}


def test_weights_of_a_checkpoint_are_all_used_and_compared_with_their_hashes(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offload.initialize(seeded(TinyLM, 4), keys_of(tmp_path)) as engine:
        engine.load_checkpoint(saved)
        expected = {name: t.clone() for name, t in engine.module.state_dict().items()}
    caplog.clear()
    assert_same_bits(weights_in(keys_of(tmp_path), saved), expected)
    assert "unused" not in caplog.text
    for name in (file.name for file in (saved / "parameters").iterdir()):
        flip_bit(saved / "parameters" / name)
        with pytest.raises(CheckpointError, match=rf"{name} is damaged: "):
            weights_in(keys_of(tmp_path), saved)
        with pytest.raises(CheckpointError, match=rf"{name} is damaged: "):
            offload.dispatch(seeded(TinyLM, 3), keys_of(tmp_path), weights=saved)
        flip_bit(saved / "parameters" / name)  # back
    assert_same_bits(weights_in(keys_of(tmp_path), saved), expected)


def test_weights_need_no_states_and_say_what_is_missing(saved: Path, tmp_path: Path) -> None:
    shutil.rmtree(saved / "optimizer")
    (saved / "run.safetensors").unlink()
    assert weights_in(keys_of(tmp_path), saved)
    (saved / "parameters/000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"parameters/000\.safetensors is missing"):
        weights_in(keys_of(tmp_path), saved)
    shutil.rmtree(saved / "parameters")
    (saved / "parameters").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"parameters/000\.safetensors is a link"):
        weights_in(keys_of(tmp_path), saved)
    (saved / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint"):
        weights_in(keys_of(tmp_path), saved)


def test_a_part_of_a_checkpoint_is_refused_and_a_file_beside_is_not(
    saved: Path, tmp_path: Path
) -> None:
    for part in ("parameters", "parameters/000.safetensors"):
        with pytest.raises(CheckpointError, match=rf"part of a checkpoint; .*{saved}$"):
            weights_in(keys_of(tmp_path), saved / part)
    beside = saved / "export" / "model.safetensors"  # it is no part of the checkpoint
    beside.parent.mkdir()
    save_file({"weight": torch.ones(3, 3)}, beside)
    model = torch.nn.Linear(3, 3, bias=False)
    with offload.initialize(model, keys_of(tmp_path), weights=beside) as engine:
        assert engine.module.state_dict()["weight"].eq(1).all()


def test_weights_whose_file_is_longer_than_its_hashes_are_refused(
    saved: Path, tmp_path: Path
) -> None:
    """As `verify` says: another file has been put there."""
    with (saved / "parameters/000.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"000\.safetensors has \d+ bytes instead of"):
        weights_in(keys_of(tmp_path), saved)


def test_what_would_take_too_much_memory_is_not_parsed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"format": "offload checkpoint", "x": [' + "[]," * (bounded_json.MAX_VALUES // 2 + 1)
    (saved / "manifest.json").write_text(text + "0]}")
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(CheckpointError, match=r"1,500,00\d values are more than"):
        CheckpointReader(saved)
    with pytest.raises(ValueError, match="more than"):
        bounded_json.parse(b" " * (bounded_json.MAX_NBYTES + 1))
