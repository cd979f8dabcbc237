"""Packing states without loss: any bits come back, and the benchmark's sums are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import contention, lossless_states
from benchmarks.exponent_packing import BLOCK, STRIP, Packed
from benchmarks.lossless_states import MOMENTS, REMAINDER, STEP, WEIGHTS
from offload.kernels.floats import Array
from offload.swap.worker import ParallelRunner

SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF,
     0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF], np.uint32,
)  # fmt: skip


def drawn() -> Array:
    """Strips of all bits, of special values, and of blocks with every range of exponents."""
    rng = np.random.default_rng(0)
    mixed = [rng.choice(rng.choice(SPECIAL, 3), BLOCK) for _ in range(STRIP // BLOCK)]
    ranges = [np.sort(rng.integers(0, 256, 2)) for _ in range(2 * STRIP // BLOCK)]
    some = [rng.integers(a, b + 1, BLOCK, dtype=np.uint32) << 23 for a, b in ranges]
    signs = np.repeat(rng.integers(0, 2, len(some), dtype=np.uint32) << 31, BLOCK)
    low = rng.integers(0, 1 << 23, signs.size, dtype=np.uint32)
    some.append(rng.integers(0, 1 << 32, STRIP, dtype=np.uint32))
    exponents = np.concatenate(some[:-1])
    return np.concatenate([*mixed, exponents | low | signs, some[-1]])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
def test_any_bits_come_back(dtype: type[np.unsignedinteger], threads: int) -> None:
    values = drawn()
    if dtype is np.uint16:
        values = np.concatenate([values >> 16, np.arange(STRIP)]).astype(np.uint16)
    packed, back = Packed(values.size, values.itemsize), np.zeros_like(values)
    runner = ParallelRunner(threads, min_share=1)
    try:
        packed.encode(values, runner)
        packed.decode(back, runner)
    finally:
        runner.close()
    np.testing.assert_array_equal(back, values)


def test_normal_numbers_take_12_of_16_and_28_of_32_bits() -> None:
    normal = np.random.default_rng(0).standard_normal(4 * STRIP).astype(np.float32)
    for values, bits in ((normal.view(np.uint32), 28), (normal.view(np.uint32) >> 16, 12)):
        kept = values.astype(np.uint16 if bits == 12 else np.uint32)
        packed = Packed(kept.size, kept.itemsize)
        packed.encode(kept)
        assert 0.99 * bits < packed.nbytes * 8 / kept.size < 1.02 * bits


def test_the_entropy_of_known_symbols() -> None:
    assert lossless_states.entropy(np.arange(8, dtype=np.uint8)) == 3.0
    values = (np.arange(1 << 16, dtype=np.uint32) % 4 + 120 << 23).astype(np.uint32)
    assert lossless_states.bits_of(values).tolist() == [2.0, 2.0, 2.0, 0.0]


def test_a_trained_model_and_a_step_of_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], long: bool
) -> None:
    if not long:
        pytest.skip("of a record that is not made again: --long")
    monkeypatch.setattr(contention, "FILE_NBYTES", 16 << 20)
    monkeypatch.setattr(contention, "SLICE_NBYTES", 16 << 20)
    found = lossless_states.trained(2, hidden=64)
    sizes = {name: sum(each.size for each in tensors) for name, tensors in found.items()}
    assert len(set(sizes.values())) == 1
    assert list(found) == list(STEP)
    shares = lossless_states.packed_shares(found)
    assert shares[REMAINDER] > 1.0 > shares[MOMENTS[0]] > shares[WEIGHTS] > 0.5
    record = lossless_states.report(found, tmp_path, 1, kernel_strips=2, step_strips=4)
    assert len(record.ratios) == 2 * len(lossless_states.PRODUCTS)
    assert all(row.measures["seconds"][0] > 0 for row in record.rows)
    assert f"{shares[WEIGHTS]:.3f}" in capsys.readouterr().out
