"""`offload bench`: each command runs, its record is complete, ratios are taken within rounds."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.bench import io_raw, limits, stream
from offload.bench.contenders import LLAMA_151M, Contender
from offload.bench.io_raw import GRID, ThreadsLoop
from offload.bench.record import Kind, Record, Row, Target
from offload.bench.rounds import interleaved
from offload.bench.step import SYSTEMS, _check_losses
from offload.bench.stream import GROUP, BusLoop
from offload.cli.app import main
from offload.config import OffloadConfig
from offload.errors import IntegrityError, UnsupportedError
from offload.planning.machine.optimizer_variants import VARIANTS, Variant, filled, stepper
from offload.planning.machine.speed_arrays import STAGGER_NBYTES, Arrays, Stream
from offload.swap.io.swap_file import SwapFile
from offload.swap.threads.worker import ParallelRunner

REPOSITORY = Path(__file__).parents[2]
TINY_MODEL = [
    "-o", "train.model.layers=2", "-o", "train.model.hidden=64", "-o", "train.model.heads=2",
    "-o", "train.model.mlp=128", "-o", "train.model.vocab=256", "-o", "train.batch=1",
    "-o", "train.sequence=16", "-o", "budget.host=80MiB", "-o", "budget.nvme=256MiB",
]  # fmt: skip
ADAM = ["adam", "--numel", "70000", "--threads", "2"]
IO = ["io", "--size", "16MiB"]
COPY = ["copy", "--size", "256KiB"]
STEP = ["step", *TINY_MODEL]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    return int(caught.value.code or 0)


def silent(_: str) -> None:
    pass


@pytest.fixture
def recorded(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a bench with two rounds; its JSON and what it printed, 100 columns wide."""
    monkeypatch.setenv("COLUMNS", "100")

    def record(*arguments: str) -> tuple[dict[str, Any], str]:
        path = tmp_path / "record.json"
        assert run(*arguments, "--rounds", "2", "--json", str(path)) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return record


def check(record: dict[str, Any], bench: str) -> dict[str, dict[str, Any]]:
    """The schema, and that every ratio follows from the rows; the rows by name."""
    assert (record["format"], record["bench"]) == (1, bench)
    assert {"cpu", "cores", "memory_nbytes", "torch"} <= set(record["machine"])
    assert any("2 rounds only" in note for note in record["notes"])
    rows = {row["name"]: row for row in record["rows"]}
    assert len(rows) == len(record["rows"])
    for row in rows.values():
        assert row["kind"] in {"limit", "ours", "peer"}
        assert row["measures"] or row["note"], row["name"]
        for measure, values in row["measures"].items():
            assert len(values) == 2
            assert row["medians"][measure] == statistics.median(values)
        assert all(second > 0 for second in row["measures"].get("seconds", ()))
    assert record["ratios"]
    for ratio in record["ratios"]:
        above, below = (_values(rows[ratio[key]], ratio["measure"]) for key in ("of", "to"))
        assert ratio["rounds"] == [a / b for a, b in zip(above, below, strict=True)]
        assert ratio["median"] == statistics.median(ratio["rounds"])
    return rows


def _values(row: dict[str, Any], measure: str) -> list[float]:
    found: list[float] = row["measures"].get(measure) or [row["facts"][measure]]
    return found


# ---------------------------------------------------------------- the commands
def test_adam_compares_every_variant_with_a_loop_of_its_own_traffic(recorded: Any) -> None:
    record, printed = recorded(*ADAM)
    rows = check(record, "adam")
    for variant in VARIANTS:
        traffic = rows[variant.name]["facts"]["traffic_nbytes_per_parameter"]
        limit = next(r["to"] for r in record["ratios"] if r["of"] == variant.name)
        assert rows[limit]["kind"] == "limit"
        bound = rows[limit]["facts"]["traffic_nbytes_per_parameter"]
        assert bound == pytest.approx(traffic, abs=0.1)  # scales of int8 blocks are left out
        speeds = rows[variant.name]["measures"]
        for per_s, nbytes_per_s in zip(
            speeds["parameters_per_s"], speeds["bytes_per_s"], strict=True
        ):
            assert nbytes_per_s == pytest.approx(per_s * traffic)
    assert record["options"]["numel"] % GROUP == 0
    assert max(map(len, printed.splitlines())) <= 100


def test_io_compares_reads_with_reads_and_writes_with_writes(recorded: Any, tmp_path: Path) -> None:
    record, printed = recorded(*IO, "--path", str(tmp_path))
    rows = check(record, "io")
    for name in ("raw read", "raw write", "ours read", "ours, no checksum write"):
        assert len(rows[name]["measures"]["cpu_s_per_gb"]) == 2
    for ratio in record["ratios"]:
        assert ratio["of"].split()[-1] == ratio["to"].split()[-1]
    assert max(map(len, printed.splitlines())) <= 100
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_copy_without_a_device_is_refused(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(*COPY) == 1
    assert "sees no GPU to copy to; `offload bench io`" in " ".join(capsys.readouterr().err.split())


@pytest.mark.gpu
def test_copy_measures_both_directions_and_both_at_once(recorded: Any) -> None:
    record, _ = recorded(*COPY)
    rows = check(record, "copy")
    for way in ("host to device", "device to host", "both at once"):
        assert rows[f"ours pinned, {way}"]["measures"]
    alone, both = (rows[f"raw, {way}"]["measures"] for way in ("host to device", "both at once"))
    ratio = (both["bytes_per_s"][0] * both["seconds"][0]) / (
        alone["bytes_per_s"][0] * alone["seconds"][0]
    )
    assert ratio == pytest.approx(2)


@pytest.mark.slow
def test_step_finds_equal_losses_and_a_roofline_of_the_same_rounds(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a peer that fails is a note."""
    monkeypatch.setattr("offload.bench.step.BUS_NUMEL", 1 << 16)
    monkeypatch.setattr("offload.bench.step.DISK_NBYTES", 32 << 20)
    broken = dataclasses.replace(
        SYSTEMS[0], name="broken", label="a peer", program="offload.bench.systems:Nothing"
    )
    monkeypatch.setattr("offload.bench.step.SYSTEMS", (*SYSTEMS, broken))
    systems = ("--systems", "plain,host,nvme,broken")
    record, printed = recorded(*STEP, *systems, "--path", str(tmp_path))
    rows = check(record, "step")
    assert rows["a peer"]["note"].startswith("failed: ")
    assert "a peer: failed: " in printed
    bounds = [
        rows[f"bound by {name}"]["measures"]["seconds"] for name in ("bus", "compute", "disk")
    ]
    highest = [max(values) for values in zip(*bounds, strict=True)]
    assert rows["roofline"]["measures"]["seconds"] == highest
    losses = record["details"]["losses"]
    assert losses["host"] == losses["nvme"]
    assert len(losses["host"]) == 2 * len(losses["plain"]) == 6  # warm-up round included
    assert rows["ours, all on nvme"]["facts"]["loss_difference"] < 1e-3
    assert all(rows["ours, all on nvme"]["measures"]["written_nbytes"])
    assert not any(rows["ours, all on host"]["measures"]["written_nbytes"])
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert max(map(len, printed.splitlines())) <= 100


# ---------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["adam", "--numbers", "3"], "No such option"),
        (["adam", "--rounds", "0"], "--rounds"),
        (["adam", "--numel", "10"], "--numel: 10 is too few"),
        (["adam", "--numel", str(10**13)], "are free; at most"),
        (["adam", "--json", "missing/file.json"], "--json: missing/file.json is no file"),
        (["io", "--size", "3 parsecs"], "--size: 'parsecs' is not a unit of bytes"),
        (["io", "--backend", "thread"], "did you mean threads?"),
        (["io", "--path", "nowhere"], "--path: nowhere is not a folder"),
        (["io", "--size", "0"], "--size: 0 bytes cannot be timed"),
        (["io", "--size", "-4KiB"], "--size: '-4KiB' is not a size"),
        (["step", "--systems", "plain,fancy"], "--systems: 'fancy' is unknown"),
        (["step", "-o", "train.model.layer=3"], "train.model.layer"),
        (["step", "-o", "optimizer.type=lion"], "set optimizer.type: adamw"),
        (["step", "-o", "precision=fp16"], "set precision: fp32 or bf16"),
        (["ranks", "--ranks", "1"], "--ranks: 1 is not several"),
        (["ranks", "--systems", "stage2,fancy"], "--systems: 'fancy' is unknown"),
        (["nonsense"], "No such command"),
    ],
)
def test_what_cannot_be_measured_is_one_message_and_exit_code_2(
    arguments: list[str], fragment: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert fragment in re.sub(r"\x1b\[[0-9;]*m", "", error)
    assert "Traceback" not in error


def test_ranks_without_a_system_that_can_run_say_why(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.bench.contenders.machine.available_memory_nbytes", lambda: 1 << 20)
    assert run("ranks", "--systems", "stage3,stage3,stage2", *TINY_MODEL) == 2
    said = capsys.readouterr().err
    assert said.count("ours, stage 3, host: left out: needs about 1.4 GiB, and 1.0 MiB") == 1
    assert "ours, stage 2, host: left out" in said
    assert "fewer --systems or --ranks" in said
    assert "Traceback" not in said


def test_a_full_disk_does_not_take_the_table_along(capsys: Any) -> None:
    assert run(*ADAM, "--rounds", "1", "--json", "/dev/full") == 2
    printed = capsys.readouterr()
    assert "offload bench adam" in printed.out
    assert "--json: /dev/full cannot be written: No space left on device" in printed.err


@pytest.mark.slow
def test_a_system_of_ours_that_fails_ends_the_bench_with_its_own_words(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.bench.step.DiskLimit", None)  # its turn does not come
    arguments = [*STEP, "--systems", "nvme", "-o", "budget.host=1MiB", "--path", str(tmp_path)]
    assert run(*arguments, "--rounds", "1") == 1
    error = capsys.readouterr().err
    assert "ours, all on nvme ended early with status 1" in error
    assert "budget.host: 1.0 MiB" in error
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- step's processes and limits
def open_files(folder: Path) -> list[str]:
    """Files of `folder` that this process holds open, unlinked ones too."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # the listing's own
    return [link for link in links if link.startswith(str(folder))]


@pytest.mark.parametrize("where", ["try_grid", "best"])
def test_an_interrupted_disk_limit_leaves_nothing_open(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (dataclasses.replace(GRID[0], block_nbytes=8192),)
    monkeypatch.setattr(limits, "GRID", small)

    def interrupted(*_: Any, **keys: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(limits, where, interrupted)
    with pytest.raises(KeyboardInterrupt), ExitStack() as stack:
        limits.DiskLimit(tmp_path, 1 << 20, silent, stack)
    assert open_files(tmp_path) == []


def contender(name: str, losses: tuple[float, ...]) -> Contender:
    made = Contender.__new__(Contender)
    made.spec = next(spec for spec in SYSTEMS if spec.name == name)
    made.losses = [(loss,) for loss in losses]
    return made


@pytest.mark.parametrize(
    ("host", "nvme", "equal"),
    [
        ((1.5, math.nan), (1.5, math.nan), True),
        ((math.inf,), (math.inf,), True),
        ((1.5,), (math.nan,), False),
        ((0.0,), (-0.0,), False),
    ],
)
def test_losses_are_equal_if_their_bits_are(
    host: tuple[float, ...], nvme: tuple[float, ...], equal: bool
) -> None:
    systems = [contender("host", host), contender("nvme", nvme)]
    if equal:
        _check_losses(systems)
        return
    with pytest.raises(IntegrityError, match="step 0: the loss is"):
        _check_losses(systems)


# ---------------------------------------------------------------- the parts
def test_what_is_not_finite_is_null_in_the_json(tmp_path: Path) -> None:
    rows = [Row("ours", Kind.OURS, {"seconds": [1.0, math.nan]}, {"loss_difference": math.inf})]
    details = {"losses": {"host": (2.5, -math.inf)}}
    record = Record("step", {}, rows=rows, details=details, machine={"cpu": "-", "cores": 1})
    record.write(tmp_path / "record.json")
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["rows"][0]["measures"]["seconds"] == [1.0, None]
    assert written["rows"][0]["facts"]["loss_difference"] is None
    assert written["details"]["losses"]["host"] == [2.5, None]


def test_ratios_are_of_rounds_not_of_medians() -> None:
    fast = Row("fast", Kind.OURS, {"seconds": [1.0, 10.0, 3.0]})
    slow = Row("slow", Kind.PEER, {"seconds": [2.0, 11.0, 30.0]})
    record = Record("adam", {}, rows=[fast, slow], machine={"cpu": "-", "cores": 1})
    record.compare("slow", "fast", "seconds", Target(1.5))
    (ratio,) = record.ratios
    assert ratio.rounds == (2.0, 1.1, 10.0)
    assert ratio.median == 2.0 != slow.median("seconds") / fast.median("seconds")


def test_a_row_that_was_not_measured_has_no_ratio() -> None:
    rows = [Row("here", Kind.OURS, {"seconds": [1.0]}), Row("absent", Kind.PEER, note="no")]
    record = Record("adam", {}, rows=rows, machine={"cpu": "-", "cores": 1})
    record.compare("here", "absent", "seconds")
    assert record.ratios == []
    assert math.isnan(rows[1].median("seconds"))


def test_rounds_begin_with_another_system_each_time() -> None:
    order: list[str] = []
    systems = {name: lambda name=name: order.append(name) for name in "abc"}
    results = interleaved(systems, 3, silent, warmup=1)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in results.items()} == {"a": 3, "b": 3, "c": 3}


def test_arrays_are_staggered_and_do_not_overlap() -> None:
    streams = [Stream("a", "float32"), Stream("b", "uint16"), Stream("c", "uint8")]
    arrays = Arrays(10_000, streams)
    made = [arrays.get(stream, lambda array: array.fill(1)) for stream in streams]
    starts = [array.ctypes.data for array in made]
    assert [(start - starts[0]) % (2 << 20) for start in starts] == [
        0, STAGGER_NBYTES, 2 * STAGGER_NBYTES,
    ]  # fmt: skip
    made[0].fill(7)
    assert made[1].max() == made[2].max() == 1
    with pytest.raises(ValueError, match="not among the arrays"):
        arrays.get(Stream("d", "float64"), lambda array: array.fill(0))


def test_the_bus_loop_meets_every_byte_and_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream("r", "uint16", updated=False), Stream("u", "float32"), Stream("v", "uint8")]
    arrays = Arrays(GROUP * 50, streams)
    made = [arrays.get(s, lambda a: a.view(np.uint8).fill(0x5A)) for s in streams]
    loop = BusLoop(streams, made, ParallelRunner(2, min_share=1))
    assert loop.traffic == 2 + 8 + 2
    assert loop.nbytes == 12 * GROUP * 50
    loop()
    assert all((array.view(np.uint8) == 0x5A).all() for array in made)
    stream._compiled.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="no C compiler was found"):
        BusLoop(streams, made, ParallelRunner(2, min_share=1))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_updates_its_weights_and_moments(variant: Variant) -> None:
    arrays = Arrays(GROUP * 64, [s for v in VARIANTS for s in v.streams])
    step = stepper(variant, arrays, ParallelRunner(2, min_share=1))
    updated = (variant.weight, *variant.record)
    before = [filled(arrays, stream).copy() for stream in updated]
    for _ in range(3):
        step()
    for each, old in zip(updated, before, strict=True):
        assert (filled(arrays, each) != old).mean() > 0.5, each.name


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offset of every block that a raw loop moves from now on."""
    offsets: list[int] = []
    move_all = io_raw.move_all

    def counted(fd: int, part: memoryview, offset_bytes: int, *, write: bool) -> None:
        offsets.append(offset_bytes)
        move_all(fd, part, offset_bytes, write=write)

    monkeypatch.setattr(io_raw, "move_all", counted)
    return offsets


SMALL_GRID = tuple(dict.fromkeys(dataclasses.replace(s, block_nbytes=8192) for s in GRID))


@pytest.mark.parametrize("small", SMALL_GRID, ids=str)
def test_raw_loops_move_what_they_say(small: Any, tmp_path: Path, moved: list[int]) -> None:
    buffer = memoryview(bytearray(small.depth * 8192 + 4096))
    aligned = -np.frombuffer(buffer, np.uint8).ctypes.data % 4096
    buffer = buffer[aligned : aligned + small.depth * 8192]
    nbytes = 8192 * 21
    with SwapFile(tmp_path, direct=False) as file:
        file.reserve(nbytes)
        loop = ThreadsLoop(small, file, buffer, nbytes)
        buffer[:] = b"\x42" * buffer.nbytes
        loop.run(write=True)
        assert os.pread(file.fd, nbytes, 0) == b"\x42" * nbytes
        assert sorted(moved) == list(range(0, nbytes, 8192))
        blocks = [bytes([number + 1]) * 8192 for number in range(21)]
        os.pwrite(file.fd, b"".join(blocks), 0)
        moved.clear()
        loop.run(write=False)
        loop.close()
    assert sorted(moved) == list(range(0, nbytes, 8192))
    parts = [bytes(buffer[i * 8192 : (i + 1) * 8192]) for i in range(small.depth)]
    untouched = b"\x42" * 8192  # threads that came too late
    assert set(parts) <= {*blocks, untouched}
    assert set(parts) & set(blocks)


def test_the_mixed_loop_reads_and_writes_what_it_is_told(tmp_path: Path) -> None:
    shape = dataclasses.replace(GRID[0], block_nbytes=4096)
    calls: list[tuple[bool, int]] = []

    with SwapFile(tmp_path, direct=False) as file:
        file.reserve(1 << 20)
        loop = ThreadsLoop(shape, file, memoryview(bytearray(2 * 4096)), 1 << 20)
        original = io_raw.move_all

        def counted(fd: int, part: memoryview, offset_bytes: int, *, write: bool) -> None:
            calls.append((write, offset_bytes))
            original(fd, part, offset_bytes, write=write)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io_raw, "move_all", counted)
            loop.mixed(12 * 4096, 4 * 4096)
        loop.close()
    assert sorted(offset for write, offset in calls if not write) == list(range(0, 12 * 4096, 4096))
    assert sorted(offset for write, offset in calls if write) == list(range(0, 4 * 4096, 4096))


def test_the_built_in_model_is_that_of_the_example() -> None:
    example = OffloadConfig.load(REPOSITORY / "examples" / "llama-151m.yaml")
    built_in = OffloadConfig.load(LLAMA_151M)
    for name in ("precision", "optimizer", "clip_grad_norm", "budget"):
        assert getattr(built_in, name) == getattr(example, name)
    assert built_in.train.model == example.train.model
    assert (built_in.train.batch, built_in.train.sequence) == (
        example.train.batch, example.train.sequence,
    )  # fmt: skip
    assert built_in.placement.activations == example.placement.activations
