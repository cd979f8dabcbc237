"""An engine whose disk does not answer: training, saving, loading and closing end, with an error
that says what is stuck. So does a Ctrl-C amid that."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.errors import StuckError
from tests.faults.faulty_files import FaultyFiles
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, losses_of, seeded

DATA = batches(3)


class Bench:
    """An engine with files of which one call gets stuck."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.files = folder, FaultyFiles()
        with self.files.installed(monkeypatch):
            self.engine = self.make(NVME, "400KiB")

    def make(self, placement: dict[str, Any], host: str) -> offload.Engine:
        keys: dict[str, Any] = {"optimizer": {"chunk": 1024}, "clip_grad_norm": 1.0}
        budget = {"host": host, "nvme": "64MiB"}
        return offload.initialize(
            seeded(TinyLM), config(self.folder, placement, budget=budget, **keys)
        )

    def train(self) -> None:
        losses_of(self.engine, DATA)
        self.engine.settle()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, monkeypatch)
    with ExitStack() as ending:
        ending.callback(bench.files.release)
        ending.callback(bench.engine.close)
        yield bench


@pytest.mark.parametrize("call", [0, 3, 20, 40])
def test_what_trains_on_a_stuck_disk_says_so_again(bench: Bench, call: int) -> None:
    bench.files.arm(call, "stuck")
    with pytest.raises(StuckError, match="has not ended for") as caught:
        bench.train()
    assert str(bench.folder) in str(caught.value)
    assert any(kind in str(caught.value) for kind in ("parameters", "gradients", "optimizer"))
    with pytest.raises(StuckError):
        bench.train()
    with pytest.raises(StuckError):
        bench.engine.settle()


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_checkpoint_on_a_stuck_disk_leaves_the_one_before(bench: Bench, verb: str) -> None:
    folder = bench.folder / "saved"
    bench.train()
    bench.engine.save_checkpoint(folder)
    bench.train()
    bench.files.arm(0, "stuck")
    use = {"save": bench.engine.save_checkpoint, "load": bench.engine.load_checkpoint}[verb]
    with pytest.raises(StuckError):
        use(folder)
    with bench.make(HOST, "16MiB") as other:
        other.load_checkpoint(folder)
        assert other.report().steps == len(DATA)


def test_a_ctrl_c_amid_a_stuck_wait_comes_through_and_closing_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, main = bench.files.hold, threading.main_thread().ident
    assert main is not None

    def held(backend: Any) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        hold(backend)

    def train() -> None:
        bench.files.arm(9, "stuck")
        bench.train()

    monkeypatch.setattr(bench.files, "hold", held)
    bench.engine.settle()
    with pytest.raises(KeyboardInterrupt):
        train()
    with suppress(StuckError):  # if no wait has raised it
        bench.engine.close()
    assert bench.engine.is_closed
