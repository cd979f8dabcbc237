"""What packing states without loss would save of a step's bytes, and what it would cost.

    python -m benchmarks.lossless_states [--steps 300] [--rounds 7] [--path FOLDER]

A small Llama shape learns bytes in bf16 with split masters. For each class of its states: the
entropy of exponents, by tensor and in blocks of 4 and 64 KiB, and of all other bytes, the bound of
any coder of order 0; and what `exponent_packing` makes of it, at about the speed of memory. Then
the bytes of a step go to and from the disk, packed and not, beside products on all cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

import offload
from benchmarks.contention import Disk, Work, beside
from benchmarks.exponent_packing import STRIP, Packed
from offload import machine
from offload.bench.record import Kind, Record
from offload.bench.rounds import Timed, measure, moving, seconds_of, sharing, timed
from offload.bench.table import Column, Grid, markdown, number, print_record
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.kernels.convert import split_master
from offload.kernels.floats import Array
from offload.train.batches import Batches

WEIGHTS, REMAINDER, GRADIENTS = "weights, bf16", "remainder, int16", "gradients, bf16"
MOMENTS = ("exp_avg, fp32", "exp_avg_sq, fp32")
# Bytes per parameter, read and written, of a step in bf16 with all states on nvme and 512 MiB of
# host memory: what `offload bench step` counts for 151 M parameters.
STEP = {
    REMAINDER: (2.0, 2.0), MOMENTS[0]: (4.0, 4.0), MOMENTS[1]: (4.0, 4.0), WEIGHTS: (1.8, 2.0),
    GRADIENTS: (0.0, 2.0),
}  # fmt: skip
SLOW_DISK = 2.4e9  # bytes/s; beside this machine's own
PRODUCTS = (0.4, 0.8, 1.2)  # times what the disk takes

Found = Mapping[str, list[Array]]  # by class, each tensor's bits as unsigned integers


def trained(steps: int, hidden: int = 384) -> dict[str, list[Array]]:
    """Each class's bits, tensor by tensor, after `steps` of 8 x 128 bytes of Python's library."""
    config = OffloadConfig.load({
        "device": "cpu", "precision": "bf16", "budget": {"host": "3GiB"}, "clip_grad_norm": 1.0,
        "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "host"),
        "optimizer": {"type": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "train": {
            "model": {"shape": "llama", "layers": 4, "hidden": hidden, "heads": 8,
                      "mlp": 4 * hidden, "max_sequence": 128},
            "text": "python", "batch": 8, "sequence": 128,
        },
    })  # fmt: skip
    model, batches = build_meta_model(config), Batches.of(config)
    found: dict[str, list[Array]] = {name: [] for name in STEP}
    with offload.initialize(model, config) as engine:
        for step in range(steps):
            engine.optimizer.zero_grad()
            model(*batches.train_at(step, 0)).loss.backward()
            if step == steps - 1:
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            engine.optimizer.step()
        states = engine.optimizer.state_dict()["state"].values()
    for grad in grads:
        found[GRADIENTS].append(grad.view(torch.int16).numpy().ravel().view(np.uint16))
    for state in states:
        master = state["master"].numpy().ravel()
        high, low = np.empty(master.size, np.uint16), np.empty(master.size, np.int16)
        split_master(master, high, low)
        found[WEIGHTS].append(high)
        found[REMAINDER].append(low.view(np.uint16))
        for name in MOMENTS:
            found[name].append(state[name.split(",")[0]].numpy().ravel().view(np.uint32))
    return found


def entropy(symbols: Array) -> float:
    """Bits per byte of `symbols`, of order 0."""
    shares = np.bincount(symbols) / symbols.size
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def in_blocks(symbols: Array, size: int) -> float:
    """The mean entropy of blocks of `size`; of the whole where it is shorter."""
    blocks = symbols[: symbols.size // size * size].reshape(-1, size)
    return float(np.mean([entropy(block) for block in blocks])) if len(blocks) else entropy(symbols)


def bits_of(values: Array) -> Array:
    """Per value: bits of its exponent, by tensor, 4 and 64 KiB; of sign and mantissa."""
    top = (values >> (8 * values.itemsize - 16)).astype(np.uint16)
    exponent = (top >> 7).astype(np.uint8)
    rest = entropy((top & 0x7F | top >> 8 & 0x80).astype(np.uint8))
    for byte in range(values.itemsize - 2):
        rest += entropy((values >> 8 * byte & 0xFF).astype(np.uint8))
    blocks = (in_blocks(exponent, nbytes // values.itemsize) for nbytes in (4096, 65536))
    return np.array([entropy(exponent), *blocks, rest])


def in_strips(tensors: Sequence[Array], strips: int = 0) -> Array:
    """One after the other, as in a record; cut, or repeated, to whole strips."""
    joined = np.concatenate(tensors)
    return np.resize(joined, (strips or max(joined.size // STRIP, 1)) * STRIP)


def packed_shares(found: Found) -> dict[str, float]:
    """By class, packed bytes over bytes. AssertionError if one bit does not come back."""
    shares = {}
    for name, tensors in found.items():
        values = in_strips(tensors)
        packed, back = Packed(values.size, values.itemsize), np.empty_like(values)
        packed.encode(values)
        packed.decode(back)
        assert np.array_equal(values, back), f"{name}: other bits than before"
        shares[name] = packed.nbytes / values.nbytes
    return shares


def table(found: Found, shares: Mapping[str, float]) -> Grid:
    rows = []
    for name, tensors in found.items():
        sizes = [tensor.size for tensor in tensors]
        bits = np.average([bits_of(tensor) for tensor in tensors], axis=0, weights=sizes)
        bound = (bits[0] + bits[3]) / (8 * tensors[0].itemsize)
        cells = [f"{each:.2f}" for each in bits]
        rows.append((name, *cells, f"{bound:.3f}", f"{shares[name]:.3f}"))
    return Grid(("bits", "exponent", "4 KiB", "64 KiB", "others", "bound", "packed"), rows)


def kernels(found: Found, strips: int, threads: int, stack: ExitStack) -> list[Timed]:
    """Copying, packing and unpacking."""
    run, systems = stack.enter_context(sharing(threads)), []
    for name in (MOMENTS[0], WEIGHTS):
        values = in_strips(found[name], strips)
        packed, other = Packed(values.size, values.itemsize), np.zeros_like(values)

        def copy(lo: int, hi: int, a: Array = other, b: Array = values) -> None:
            np.copyto(a[lo:hi], b[lo:hi])

        works: tuple[tuple[str, Kind, Work], ...] = (
            ("copy", Kind.LIMIT, partial(run, copy, values.size)),
            ("pack", Kind.OURS, partial(packed.encode, values, run)),
            ("unpack", Kind.OURS, partial(packed.decode, other, run)),
        )
        for verb, kind, work in works:
            label = f"{verb} {name}, on {threads}"
            systems.append(moving(label, kind, values.nbytes, work))
    return systems


class Step:
    """A step's bytes, as they are and packed, and the packing."""

    def __init__(
        self, found: Found, shares: Mapping[str, float], strips: int, path: Path, stack: ExitStack
    ) -> None:
        numel = 8 * strips * STRIP  # parameters
        moved = {name: numel * np.array(each) for name, each in STEP.items()}
        whole, less = np.zeros(2), np.zeros(2)  # bytes read and written
        for name, amounts in moved.items():
            whole += amounts
            less += amounts * min(shares[name], 1.0)
        self.nbytes = [whole.sum(), less.sum()]
        self.disks = []
        for read, written in (whole, less):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path)))
            self.disks.append(Disk(folder, read, written, stack).slices(checked=True))
        self.packing: list[Work] = []
        for name in set(STEP) - {REMAINDER}:  # whose bits are noise
            values = in_strips(found[name], strips)
            packed, back = Packed(values.size, values.itemsize), np.empty_like(values)
            packed.encode(values)
            works = partial(packed.decode, back), partial(packed.encode, values)
            for work, amount in zip(works, moved[name], strict=True):
                self.packing += [work] * round(amount / values.nbytes)
        self._run = stack.enter_context(sharing(machine.cpu_count()))
        torch.set_num_threads(1)  # a thread shared by one product would be waited for by all
        self._matrix = torch.randn(1024, 1024).bfloat16()

    def products(self, count: int) -> Work:
        """On all cores."""

        def some(lo: int, hi: int) -> None:
            for _ in range(lo, hi):
                torch.mm(self._matrix, self._matrix)

        return partial(self._run, some, count)

    def systems(self, record: Record) -> list[Timed]:
        """With products that take a share of the disk's time."""
        alone = {
            "disk": _all(self.disks[0]), "packing": _all(self.packing),
            "50 products": self.products(50),
        }  # fmt: skip
        tries = {name: [seconds_of(work) for _ in range(30)] for name, work in alone.items()}
        disk_s, product_s = min(tries["disk"]), min(tries["50 products"]) / 50
        whole, less = self.nbytes
        record.notes.append(
            f"a step moves {whole / 1e9:.2f} GB, packed {less / 1e9:.2f} ({less / whole:.3f})"
        )
        systems = [Timed(f"{name} alone", Kind.LIMIT, timed(work)) for name, work in alone.items()]
        for rate in (whole / disk_s, SLOW_DISK):
            each_s = 0.0 if rate > SLOW_DISK else whole / rate / len(self.disks[0])
            plain = [_lasting(work, each_s) for work in self.disks[0]]
            each_s *= less / whole * len(self.disks[0]) / len(self.disks[1])
            packed = [_lasting(work, each_s) for work in self.disks[1]]
            for share in PRODUCTS:
                products = self.products(round(share * whole / rate / product_s))
                name = f"{rate / 1e9:.1f} GB/s, products {share:g} x"
                for label, kind, streams in (
                    (name, Kind.LIMIT, [plain]),
                    (f"{name}, packed", Kind.OURS, [packed, self.packing]),
                ):
                    systems.append(Timed(label, kind, timed(partial(_beside, products, streams))))
        return systems


def _all(works: Sequence[Work]) -> Work:
    return lambda: [work() for work in works]


def _lasting(work: Work, seconds: float) -> Work:
    """A slice of a disk that needs at least `seconds` for it."""
    return lambda: time.sleep(max(0.0, seconds - seconds_of(work)))


def _beside(products: Work, streams: Sequence[Sequence[Work]]) -> None:
    with beside(streams, 0.0):
        products()


def report(
    found: Found, path: Path, rounds: int, *, kernel_strips: int = 256, step_strips: int = 64
) -> Record:
    """Prints all; returns what was timed."""
    shares = packed_shares(found)
    print(markdown(table(found, shares)), flush=True)
    record = Record("lossless_states", {"rounds": rounds})
    with ExitStack() as stack:
        for threads in sorted({1, machine.cpu_count()}):
            systems = kernels(found, kernel_strips, threads, stack)
            measure(record, systems, rounds, lambda _: None)
        step = Step(found, shares, step_strips, path, stack)
        measure(record, step.systems(record), rounds, lambda _: None)
    for row in record.rows:
        if row.name.endswith(", packed"):
            record.compare(row.name, row.name.removesuffix(", packed"), "seconds")
    record.note_rounds(rounds)
    columns = [
        Column("s", number("seconds", digits=3)), Column("GB/s", number("bytes_per_s", 1e9, 1)),
        Column("CPU-s/GB", number("cpu_s_per_gb", digits=3)),
    ]  # fmt: skip
    print_record(record, columns)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    report(trained(options.steps), options.path, options.rounds)


if __name__ == "__main__":
    main()
