"""Exports and imports of checkpoints on a disk that fails at any call: the bits of one
without faults, or an error that says why. Nothing is half there under the name that was asked for,
the source is as it was, and the next try succeeds."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload.checkpoint.foreign.exporting import export
from offload.checkpoint.format.manifest import MANIFEST, Manifest
from offload.deepspeed.importing import import_checkpoint
from offload.errors import OffloadError
from tests.deepspeed import zero_files
from tests.deepspeed.test_importing import trained
from tests.faults.checkpoint_bench import Tally
from tests.faults.faulty_calls import UNSEEN, FaultyCalls, kinds_of
from tests.offload.engine_cases import HOST, TinyLM, batches, config, losses_of, seeded

LONG_CASES = 3000
TAG = "step3"
Found = dict[str, bytes]  # what is in a result, by name


class Bench:
    """Sources, and a folder for what is made of them."""

    def __init__(self, folder: Path) -> None:
        self.sources, self.outs = folder / "sources", folder / "outs"
        self.saved, self.theirs = self.sources / "saved", self.sources / "theirs"
        self.sources.mkdir()
        self.outs.mkdir()
        self.calls = FaultyCalls()
        with offload.initialize(seeded(TinyLM), config(folder, HOST, precision="bf16")) as engine:
            losses_of(engine, batches(2))
            engine.save_checkpoint(self.saved)
        zero_files.write(self.theirs / TAG, *trained(), 2, 2)
        # its source, what makes `out` of it, and how `out` is read
        self.verbs: dict[str, tuple[Path, Callable[[Path], Any], Callable[[Path], Found]]] = {
            "export a file": (
                self.saved, lambda out: export(self.saved, out, "fp32"), tensors_of,
            ),
            "export a folder": (self.saved, lambda out: export(self.saved, out), tensors_of),
            "import-deepspeed": (
                self.theirs, lambda out: import_checkpoint(self.theirs, out), imported,
            ),
        }  # fmt: skip
        self.source_bytes = bytes_of(self.sources)
        self.expected = {verb: self.made(verb) for verb in self.verbs}

    def out(self, verb: str) -> Path:
        return self.outs / ("out.safetensors" if verb == "export a file" else "out")

    def made(self, verb: str) -> Found:
        """Without faults."""
        _, make, read = self.verbs[verb]
        out = self.out(verb)
        make(out)
        found = read(out)
        shutil.rmtree(self.outs)
        self.outs.mkdir()
        return found

    def count(self, verb: str) -> Counter[str]:
        self.calls.arm("", 0, "")
        self.verbs[verb][1](self.out(verb))
        seen = Counter(self.calls.seen)
        shutil.rmtree(self.outs)
        self.outs.mkdir()
        return seen

    def meet(
        self, verb: str, operation: str, number: int, kind: str, *, always: bool
    ) -> OffloadError | None:
        """The error, if there was any; whatever happened, it has ended well."""
        source, make, read = self.verbs[verb]
        out = self.out(verb)
        self.calls.arm(operation, number, kind, always=always)
        caught: OffloadError | None = None
        try:
            make(out)
        except OffloadError as error:
            caught = error
        hit, hits = self.calls.hit, self.calls.hits
        foreign = source == self.theirs and hit.rpartition(" of ")[2].startswith(
            str(source)
        )  # it has no hashes
        unseen = hits and kind in UNSEEN and (operation == "pwrite" or foreign)
        if caught is not None:
            assert str(self.outs.parent) in str(caught), hit
        self.calls.release()
        if caught is None or self._is_complete(verb, out):
            try:
                assert unseen or read(out) == self.expected[verb], hit
            except OffloadError:
                assert unseen, hit
        elif verb != "import-deepspeed":
            assert not os.path.lexists(out), hit
        assert bytes_of(self.sources) == self.source_bytes, hit
        # what is left of it, beside the name that was asked for, is in nobody's way
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        make(out)
        assert read(out) == self.expected[verb], hit
        shutil.rmtree(self.outs)
        self.outs.mkdir()
        return caught

    @staticmethod
    def _is_complete(verb: str, out: Path) -> bool:
        """Whether it counts."""
        return os.path.lexists(out / "latest" if verb == "import-deepspeed" else out)


def bytes_of(folder: Path) -> Found:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def tensors_of(out: Path) -> Found:
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    assert files
    return packed({name: value for file in files for name, value in load_file(file).items()})


def packed(tensors: dict[str, torch.Tensor]) -> Found:
    return {
        f"{name} {value.dtype} {tuple(value.shape)}":
        value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in tensors.items()
    }  # fmt: skip


def checkpoint_of(out: Path) -> Found:
    """What a checkpoint says, apart from what differs each time, and its tensors."""
    manifest = Manifest.from_json((out / MANIFEST).read_bytes(), str(out))
    said = manifest.model_dump(exclude={"files", "generation"})
    tensors = {n: v for f in sorted(out.rglob("*.safetensors")) for n, v in load_file(f).items()}
    return {**packed(tensors), "": repr(said).encode()}


def imported(out: Path) -> Found:
    texts = {"latest": (out / "latest").read_bytes()}
    return {**checkpoint_of(out / TAG), **texts}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group: DCP says that it assumes one process
        bench = Bench(tmp_path_factory.mktemp("bench"))
        with bench.calls.installed():
            yield bench


def test_drawn_faults_leave_the_bits_or_an_error(
    bench: Bench, long: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {verb: bench.count(verb) for verb in bench.verbs}
    tally = Tally()
    for seed in range(10**9):
        draw = random.Random(seed)
        verb = [*calls][seed % len(calls)]
        operation = draw.choice(sorted(calls[verb]))
        number, kind = draw.randrange(calls[verb][operation]), draw.choice(kinds_of(operation))
        try:
            error = bench.meet(verb, operation, number, kind, always=draw.random() < 0.2)
        except BaseException:
            print(seed, verb, bench.calls.hit)  # by pytest, with the failure
            raise
        what = verb, kind
        tally.count(what, bench.calls.hits, failed=error is not None)
        if tally.cases.total() >= (LONG_CASES if long else 9):
            break
    with capsys.disabled():
        print(str(tally).replace("call ", "verb ", 1))
    assert {verb for verb, _ in tally.faults} == set(bench.verbs)
