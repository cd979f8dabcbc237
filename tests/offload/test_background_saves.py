"""A save that goes on while the model trains: the bytes of one that is waited for, and no other
bits of training, wherever states live, whatever fails and whatever writes to them meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offload
from offload import checkpoint
from offload.checkpoint.engine.background import BackgroundSave
from offload.errors import NoSpaceError, PathError, StateError, StorageError
from offload.planning.plan.plan import needed_nbytes
from offload.swap.io.block_store import BlockStore
from offload.swap.threads.save_gate import SaveGate
from offload.tiers.tier import Tier
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, min_budget, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of
from tests.offload.test_parity import PLACEMENTS

REPOSITORY = Path(__file__).parents[2]
OPTIMIZERS: list[dict[str, Any]] = [
    {}, {}, {"master": "fp32"}, {"amsgrad": True}, {"type": "lion"}, {"states": "int8"},
    {"states": "bf16"}, {"type": "sgd", "momentum": 0.9},
]  # fmt: skip


def files_of(path: Path) -> dict[str, bytes]:
    """All data files."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*.safetensors")}


@contextmanager
def slow(seed: int = 0, max_s: float = 0.01) -> Iterator[None]:
    """The thread of a save stops after each piece, for a while."""
    check, draw = BackgroundSave._check, random.Random(seed)

    def sleeping(self: BackgroundSave, nbytes: int) -> None:
        time.sleep(draw.choice([0, draw.uniform(0, max_s)]))
        check(self, nbytes)

    BackgroundSave._check = sleeping  # type: ignore[method-assign]
    try:
        yield
    finally:
        BackgroundSave._check = check  # type: ignore[method-assign]


class Held:
    """A save stops before its first piece until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        write = BackgroundSave._write

        def held(save: BackgroundSave, saver: Any, gate: Any) -> None:
            self.begun.set()
            assert self.go.wait(20)
            write(save, saver, gate)

        monkeypatch.setattr(BackgroundSave, "_write", held)


# ------------------------------------------------------------------------- the same bytes and bits
def drawn_keys(draw: random.Random, folder: Path, stage: int | None) -> tuple[dict[str, Any], int]:
    """A configuration, and how many batches a step has; with a `stage` for several ranks."""
    precision = draw.choice(["fp32", "bf16", "bf16", "fp16"])
    accumulate = draw.choice([1, 1, 3])
    homes = dict(PLACEMENTS[draw.choice(sorted(PLACEMENTS))])
    if precision != "fp32" and accumulate > 1:  # sums in fp32 are refused on nvme
        homes["gradients"] = "host"
    clip = draw.choice([None, None, 0.5, 1e9])
    optimizer = {"lr": 3e-3, "weight_decay": 0.1, "chunk": draw.choice([2048, 4096, "auto"])}
    if precision == "fp32":
        optimizer |= draw.choice([{}, {"amsgrad": True}])
    else:
        optimizer |= draw.choice(OPTIMIZERS)
    optimizer["in_backward"] = clip is None and precision != "fp16" and draw.random() < 0.4
    homes["activations"] = {"tier": draw.choice(["device", "device", "nvme"]), "checkpoint": False}
    keys = config(
        folder, homes, precision=precision, gradient_accumulation_steps=accumulate,
        clip_grad_norm=clip, optimizer=optimizer, prefetch=draw.choice([0, "auto", 8]),
    )  # fmt: skip
    if stage is not None:
        keys |= {"zero": {"stage": stage}, "budget": {"host": "64MiB", "nvme": "64MiB"}}
    elif draw.random() < 0.5 and homes["activations"]["tier"] == "device":
        keys["budget"] = min_budget(TinyLM, keys)
    if draw.random() < 0.5:  # nvme, too, has no more than is needed
        with offload.initialize(seeded(TinyLM), keys) as engine:
            saved = engine.plan.activations
            needed = needed_nbytes(engine.plan, Tier.NVME) + (saved.disk_nbytes if saved else 0)
        keys["budget"] = {**keys["budget"], "nvme": max(needed, 1 << 16)}
    return keys, accumulate


def trained(keys: Mapping[str, Any], accumulate: int, between: Callable[[Any], None]) -> Any:
    """Losses and states after six steps, with `between(engine)` after each."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with offload.initialize(seeded(TinyLM), dict(keys)) as engine:
        losses = []
        for step in range(6):
            data = batches(accumulate * size, seed=step)[rank * accumulate :]
            losses += losses_of(engine, data[:accumulate], accumulate)
            between(engine)
        engine.checkpoint_saved()
        states = states_of(engine)
        engine.check_integrity()
        for tier, report in engine.report().tiers.items():
            assert report.peak_nbytes <= report.budget_nbytes, tier
        return losses, states


@pytest.mark.sample("0")
@pytest.mark.parametrize("seed", range(4))
def test_it_has_the_bytes_of_one_that_is_waited_for_and_training_its_bits(
    tmp_path: Path, seed: int, long: bool
) -> None:
    compare_drawn(range(seed * 100, seed * 100 + (18 if long else 1)), str(tmp_path))


def compare_drawn(numbers: range, parent: str, *, ranks: bool = False) -> None:
    for number in numbers:
        draw, folder = random.Random(number), Path(parent) / str(number)
        keys, accumulate = drawn_keys(draw, folder, draw.randrange(4) if ranks else None)
        expected = trained(keys, accumulate, lambda engine: None)
        with slow(number):
            losses, states = trained(keys, accumulate, partial(_save_and_compare, draw, folder))
        assert files_of(folder / "behind") == files_of(folder / "waited"), keys
        assert losses == expected[0], keys
        assert_same_bits(states, expected[1])


def _save_and_compare(draw: random.Random, folder: Path, engine: offload.Engine) -> None:
    waited, behind = folder / "waited", folder / "behind"
    if waited.exists() and draw.random() < 0.4:
        engine.checkpoint_saved(wait=False)
        return
    engine.checkpoint_saved()
    if waited.exists():
        assert files_of(behind) == files_of(waited), engine.config
    engine.save_checkpoint(waited)
    engine.save_checkpoint(behind, wait=False)
    if draw.random() < 0.4:
        next_one = draw.choice(
            [engine.load_checkpoint, partial(engine.save_checkpoint, wait=False)]
        )
        next_one(behind)


# ------------------------------------------------------------------------- writes meanwhile
def test_on_nvme_training_goes_on_while_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with offload.initialize(seeded(TinyLM), config(tmp_path, NVME)) as engine:
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "waited")
        engine.save_checkpoint(tmp_path / "behind", wait=False)
        losses_of(engine, batches(3, seed=2))
        engine.settle()
        assert not engine.checkpoint_saved(wait=False)
        assert not (tmp_path / "behind").exists()
        assert engine.last_checkpoint is not None
        assert engine.last_checkpoint.path.name == "waited"
        held.go.set()
        assert engine.checkpoint_saved()
        assert engine.last_checkpoint.path.name == "behind"
        assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")
        used = engine.report().tiers["nvme"].used_nbytes
        losses_of(engine, batches(1, seed=3))
        engine.settle()
        assert engine.report().tiers["nvme"].used_nbytes == used, "old versions are gone"


def test_an_update_in_host_memory_waits_for_its_group_and_gets_it_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    let_pass = SaveGate.passed

    def passing(self: SaveGate, index: int) -> None:
        passed.append(index)
        let_pass(self, index)

    monkeypatch.setattr(SaveGate, "passed", passing)
    held = Held(monkeypatch)
    placement = PLACEMENTS["parameters on nvme"]  # so that a step does not wait for its updates
    with offload.initialize(seeded(TinyLM), config(tmp_path, placement)) as engine:
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "behind", wait=False)
        losses_of(engine, batches(1, seed=2))
        updates = engine._runtime.updates
        pending = [g.index for g in engine.store.groups if updates.is_pending(g.index)]
        assert len(pending) > 2
        while any(index not in updates.gate._wanted for index in pending):
            time.sleep(0.001)  # until the thread of updates has looked at all of them
        updates.promote(pending[-1])  # a group that is needed now
        held.go.set()
        engine.checkpoint_saved()
        engine.settle()
    assert passed[:2] == [pending[-1], pending[0]]
    assert sorted(passed) == sorted(pending)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [HOST, NVME, PLACEMENTS["mixed"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_users_write_meanwhile_is_not_in_it(
    tmp_path: Path, placement: dict[str, Any], precision: str
) -> None:
    keys = config(tmp_path, placement, precision=precision)
    with slow(max_s=0.05), offload.initialize(seeded(TinyLM), keys) as engine:
        losses_of(engine, batches(1))
        entries = engine.optimizer.state_dict()
        losses_of(engine, batches(1, seed=2))
        engine.save_checkpoint(tmp_path / "waited")
        states = states_of(engine)
        for write in range(4):
            engine.save_checkpoint(tmp_path / "behind", wait=False)
            with torch.no_grad():
                if write == 0:
                    for param in engine.module.parameters():
                        param.data.add_(1)
                elif write == 1:
                    with engine.gathered():
                        for param in engine.module.parameters():
                            param.mul_(0.5)
                elif write == 2:
                    engine.optimizer.load_state_dict(entries)
                else:
                    values = engine.module.state_dict()
                    engine.module.load_state_dict({n: v + 1 for n, v in values.items()})
            engine.optimizer.param_groups[0]["lr"] = 0.5
            losses_of(engine, batches(1, seed=3))
            engine.load_checkpoint(tmp_path / "behind")
            assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited"), write
            assert_same_bits(states_of(engine), states)


class Normed(nn.Module):
    """With buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(x))
        return y


@pytest.mark.parametrize("placement", [HOST, NVME])
def test_buffers_steps_and_numbers_are_those_of_the_call(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    def step(engine: offload.Engine, seed: int) -> None:
        torch.manual_seed(seed)
        engine.backward(engine.module(torch.randn(4, 8)).square().mean())
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    with slow(), offload.initialize(seeded(Normed), config(tmp_path, placement)) as engine:
        step(engine, 1)
        engine.save_checkpoint(tmp_path / "waited")
        engine.save_checkpoint(tmp_path / "behind", wait=False)
        engine.optimizer.param_groups[0]["lr"] = 7.0
        step(engine, 2)
        step(engine, 3)
        engine.load_checkpoint(tmp_path / "behind")
        assert engine.report().steps == 1
        assert engine.optimizer.param_groups[0]["lr"] != 7.0
        assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")


# ------------------------------------------------------------------------- one at a time
def test_the_next_save_a_load_and_close_wait_for_it(tmp_path: Path) -> None:
    with slow(max_s=0.05), offload.initialize(seeded(TinyLM), config(tmp_path, NVME)) as engine:
        losses_of(engine, batches(1))
        for name in ("a", "b"):
            engine.save_checkpoint(tmp_path / name, wait=False)
        assert (tmp_path / "a").is_dir()
        engine.save_checkpoint(tmp_path / "c")
        assert (tmp_path / "b").is_dir()
        engine.save_checkpoint(tmp_path / "d", wait=False)
        engine.load_checkpoint(tmp_path / "a")
        assert (tmp_path / "d").is_dir()
        engine.save_checkpoint(tmp_path / "h", wait=False)
    assert sorted(os.listdir(tmp_path)) == list("abcdh")
    assert "offload-checkpoint_0" not in {t.name for t in threading.enumerate()}


def test_an_engine_that_is_dropped_completes_it(tmp_path: Path) -> None:
    with slow(max_s=0.05):
        engine = offload.initialize(seeded(TinyLM), config(tmp_path, HOST))
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "saved", wait=False)
        (thread,) = [t for t in threading.enumerate() if t.name.startswith("offload-checkpoint")]
        del engine
        thread.join(60)
    assert os.listdir(tmp_path) == ["saved"]


def test_where_it_cannot_go_on_beside_training_it_waits_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.swap.states.cached_file_state import CachedFileState

    with offload.initialize(seeded(TinyLM), config(tmp_path, NVME)) as engine:
        monkeypatch.setattr(CachedFileState, "can_snapshot", False)
        with caplog.at_level(logging.WARNING, logger="offload"):
            for name in ("a", "b"):
                engine.save_checkpoint(tmp_path / name, wait=False)
                assert (tmp_path / name).is_dir()
    said = [r.getMessage() for r in caplog.records if "wait=False" in r.getMessage()]
    assert len(said) == 1
    assert "parameters is quantized" in said[0]


# ------------------------------------------------------------------------- what goes wrong
def test_what_is_wrong_with_the_state_or_the_folder_is_raised_at_once(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as engine:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "diary.txt").write_text("dear diary")
        with pytest.raises(PathError, match="diary"):
            engine.save_checkpoint(tmp_path / "mine", wait=False)
        engine.backward(engine.module.loss(batches(1)[0]))  # type: ignore[operator]
        with pytest.raises(StateError, match="gradients wait"):
            engine.save_checkpoint(tmp_path / "saved", wait=False)
        engine.optimizer.zero_grad()
        assert engine.checkpoint_saved(wait=False)
        engine.save_checkpoint(tmp_path / "saved", wait=False)
        losses_of(engine, batches(2))
    assert sorted(os.listdir(tmp_path)) == ["mine", "saved"]


@pytest.mark.sample("data-placement0")
@pytest.mark.parametrize("placement", [HOST, NVME])
@pytest.mark.parametrize("where", ["data", "sync", "swap"])
def test_a_fault_of_the_thread_is_raised_where_it_is_waited_for_and_training_goes_on(
    tmp_path: Path, placement: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch,
    long: bool,
) -> None:  # fmt: skip
    if where == "swap" and placement is HOST:
        pytest.skip("nothing is read from there")
    expected = trained(config(tmp_path, placement), 1, lambda engine: None)
    draw = random.Random(0)
    waits = ("saved", "save", "load", "close")
    if not long and where != "swap":  # each one twice
        waits = waits[:2] if (where == "sync") is (placement is HOST) else waits[2:]
    for waiting in waits:
        with offload.initialize(seeded(TinyLM), config(tmp_path, placement)) as engine:
            losses = losses_of(engine, batches(1, seed=0))
            engine.save_checkpoint(tmp_path / "saved")
            before = files_of(tmp_path / "saved")
            held = Held(monkeypatch)
            engine.save_checkpoint(tmp_path / "saved", wait=False)
            with monkeypatch.context() as patch:
                kind = _break(patch, where, after=draw.randrange(3))
                held.go.set()
                for step in range(1, 6):
                    losses += losses_of(engine, batches(1, seed=step))
                with pytest.raises(kind):
                    _wait(engine, waiting, tmp_path)
            monkeypatch.undo()
            assert losses == expected[0]
            assert files_of(tmp_path / "saved") == before
            if waiting == "close":
                assert engine.is_closed
            else:
                assert engine.checkpoint_saved(), "it is raised once"
                assert_same_bits(states_of(engine), expected[1])
                engine.save_checkpoint(tmp_path / "saved", wait=False)
                engine.check_integrity()
        if waiting == "save":  # where its disk let it, this one is there all the same
            shutil.rmtree(tmp_path / "next", ignore_errors=True)
        assert os.listdir(tmp_path) == ["saved"]


def _wait(engine: offload.Engine, how: str, folder: Path) -> None:
    ways: dict[str, Callable[[], object]] = {
        "save": lambda: engine.save_checkpoint(folder / "next"),
        "load": lambda: engine.load_checkpoint(folder / "saved"),
        "close": engine.close,
        "saved": engine.checkpoint_saved,
    }
    ways[how]()


def _break(patch: pytest.MonkeyPatch, where: str, after: int) -> type[Exception]:
    """The `after`-th call fails from here on, in the threads of a save alone."""
    left = [after]

    def broken(call: Any, number: int) -> Any:
        def wrapper(*args: Any, **keys: Any) -> Any:
            if threading.current_thread().name.startswith("offload-checkpoint"):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(number, os.strerror(number))
            return call(*args, **keys)

        return wrapper

    if where == "data":
        patch.setattr(os, "pwrite", broken(os.pwrite, errno.ENOSPC))
        return NoSpaceError
    if where == "sync":
        patch.setattr(os, "fsync", broken(os.fsync, errno.EIO))
        return StorageError
    read = BlockStore.read

    def damaged(self: BlockStore, block: Any, destination: memoryview, **keys: Any) -> Any:
        if threading.current_thread().name.startswith("offload-checkpoint"):
            left[0] -= 1
            if left[0] < 0:
                raise StorageError("the swap file cannot be read", errno=errno.EIO)
        return read(self, block, destination, **keys)

    patch.setattr(BlockStore, "read", damaged)
    return StorageError


@pytest.mark.parametrize("placement", [HOST, NVME])
def test_a_ctrl_c_while_close_waits_ends_it_and_leaves_the_checkpoint_before(
    tmp_path: Path, placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = offload.initialize(seeded(TinyLM), config(tmp_path, placement))
    losses_of(engine, batches(1))
    engine.save_checkpoint(tmp_path / "saved")
    before = files_of(tmp_path / "saved")
    losses_of(engine, batches(1, seed=2))
    with slow(max_s=0.2):
        held = Held(monkeypatch)
        engine.save_checkpoint(tmp_path / "saved", wait=False)

        def interrupt() -> None:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)  # to the main thread, as a terminal's
            time.sleep(0.2)
            held.go.set()

        alarm = threading.Thread(target=interrupt)
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        alarm.join()
    assert engine.is_closed
    assert files_of(tmp_path / "saved") == before
    assert os.listdir(tmp_path) == ["saved"]


def test_a_ctrl_c_while_a_save_is_waited_for_ends_the_wait_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, NVME)) as engine:
        held = Held(monkeypatch)
        engine.save_checkpoint(tmp_path / "saved", wait=False)
        alarm = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            engine.checkpoint_saved()
        held.go.set()
        assert engine.checkpoint_saved()
    assert (tmp_path / "saved").is_dir()


def test_a_forked_child_neither_waits_for_it_nor_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as engine:
        held = Held(monkeypatch)
        engine.save_checkpoint(tmp_path / "saved", wait=False)
        assert held.begun.wait(60)
        pid = os.fork()
        if pid == 0:
            engine.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        held.go.set()
        losses_of(engine, batches(2))
        assert engine.checkpoint_saved()
    assert os.listdir(tmp_path) == ["saved"]


_KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import offload
from offload.checkpoint.engine.background import BackgroundSave
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, losses_of, seeded
folder, placement, after_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
check = BackgroundSave._check
def slow(self, nbytes):
    time.sleep(0.01)
    check(self, nbytes)
BackgroundSave._check = slow
keys = config(folder, NVME if placement == "nvme" else HOST)
engine = offload.initialize(seeded(TinyLM), keys)
losses_of(engine, batches(1))
engine.save_checkpoint(folder / "saved" / "step-000001")
print("ready", flush=True)
threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
for step in range(2, 1000):
    losses_of(engine, batches(1, seed=step))
    engine.save_checkpoint(folder / "saved" / f"step-{step:06d}", wait=False)
"""


@pytest.mark.sample("nvme")
@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_killed_while_it_is_under_way_what_was_complete_is_there(
    tmp_path: Path, placement: str, long: bool
) -> None:
    draw = random.Random(0)
    for _ in range(20 if long else 1):
        arguments = [str(tmp_path), placement, str(draw.uniform(0.05, 1.0))]
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, *arguments], cwd=REPOSITORY, capture_output=True,
            text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
        latest = checkpoint.latest(tmp_path / "saved")
        assert latest is not None
        homes = NVME if placement == "nvme" else HOST
        with offload.initialize(seeded(TinyLM, 1), config(tmp_path, homes)) as engine:
            engine.load_checkpoint(latest)
            step = engine.report().steps
            assert latest.name == f"step-{step:06d}"
            resumed = states_of(engine)
            engine.save_checkpoint(tmp_path / "saved" / "next", wait=False)
        with offload.initialize(seeded(TinyLM), config(tmp_path, homes)) as engine:
            for number in range(1, step + 1):
                losses_of(engine, batches(1, seed=number))
            assert_same_bits(states_of(engine), resumed)
        assert not [n for n in os.listdir(tmp_path / "saved") if "tmp" in n]
        shutil.rmtree(tmp_path / "saved")


def test_a_program_that_ends_completes_it_first(tmp_path: Path) -> None:
    lines = _KILLED.replace("range(2, 1000)", "range(2, 4)").splitlines()
    program = "\n".join(line for line in lines if "Timer" not in line)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "nvme", "0"], cwd=REPOSITORY,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "saved")) == [f"step-00000{n}" for n in (1, 2, 3)]


def test_without_a_thread_it_is_refused_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        if self.name.startswith("offload-checkpoint"):
            raise RuntimeError("can't start new thread")
        start(self)

    with offload.initialize(seeded(TinyLM), config(tmp_path / "swap", NVME)) as engine:
        monkeypatch.setattr(threading.Thread, "start", started)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            engine.save_checkpoint(tmp_path / "saved", wait=False)
        assert not (tmp_path / "saved").exists()
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "saved")
