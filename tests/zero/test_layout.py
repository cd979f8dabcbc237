"""Flat buffers and records: where everything lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.kernels.rules import StateFormat
from offload.kernels.variants import Master
from offload.zero.groups.layout import ALIGN_NUMEL, ParamShape, lay_out
from offload.zero.step.records import RecordFormat
from tests.kernels.reference import encode_int8

shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.booleans()), min_size=1, max_size=8
)


@given(shapes=shapes)
@settings(deadline=None, derandomize=True)
def test_parameters_do_not_overlap_and_trainable_ones_come_first(shapes):
    params = [
        ParamShape((f"p{i}",), tuple(shape), trainable)
        for i, (shape, trainable) in enumerate(shapes)
    ]
    layout = lay_out(params)
    end = 0
    for spec in layout.params:
        assert spec.offset >= end
        assert spec.offset % ALIGN_NUMEL == 0
        end = spec.stop
        assert spec.trainable == (spec.offset < layout.numel_trainable or spec.numel == 0) or (
            spec.numel == 0
        )
    assert end <= layout.numel
    assert {spec.name for spec in layout.params} == {param.names[0] for param in params}


@given(numel=st.integers(0, 10_000), chunk=st.sampled_from([64, 1024, 4096]))
@settings(deadline=None, derandomize=True)
def test_chunks_tile_the_trainable_part(numel, chunk):
    layout = lay_out([ParamShape(("p",), (numel,))])
    covered = [i for piece in layout.chunks(chunk) for i in piece]
    assert covered == list(range(layout.numel_trainable))


ADAM = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("master", list(Master))
@pytest.mark.parametrize("states", [(), ("sum",), ADAM, (*ADAM, "max_exp_avg_sq")])
@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("numel", [1, 64, 1000])
def test_the_arrays_of_a_record_do_not_overlap(master, states, state_format, numel):
    record_format = RecordFormat(master, states, state_format)
    record = torch.zeros(record_format.nbytes(numel), dtype=torch.uint8)
    arrays = record_format.arrays(record, numel)
    assert [field.name for field in record_format.fields] == list(arrays)
    for number, (field, array) in enumerate(
        zip(record_format.fields, arrays.values(), strict=True), 1
    ):
        assert array.shape == (field.numel(numel),)
        assert array.ctypes.data % array.itemsize == 0
        array[:] = number
    for number, array in enumerate(arrays.values(), 1):
        assert np.all(array == number)


def test_split_masters_cost_two_bytes_and_full_ones_four():
    sizes = [RecordFormat(master).nbytes(1 << 20) for master in Master]
    none, split, full = (round(size / (1 << 20)) for size in sizes)
    assert (none, split, full) == (8, 10, 12)


def test_states_of_16_and_8_bits_cost_what_they_say():
    kinds = [RecordFormat(Master.SPLIT, ADAM, kept) for kept in StateFormat]
    fp32, bf16, int8 = (kept.nbytes(1 << 20) / (1 << 20) for kept in kinds)
    assert round(fp32) == 10
    assert round(bf16) == 6
    assert int8 == pytest.approx(4 + 2 * 4 / 256, abs=0.01)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("numel", [1, 256, 1000])
def test_8_bit_states_read_out_and_written_back_are_the_same(name, numel):
    """Whatever a step may leave in a record: rounded stochastically, of many magnitudes."""
    kept = RecordFormat(Master.NONE, ADAM, StateFormat.INT8)
    record = torch.zeros(kept.nbytes(numel), dtype=torch.uint8)
    arrays = kept.arrays(record, numel)
    random = np.random.default_rng(numel)
    values = (random.normal(size=numel) * np.exp2(random.normal(0, 4, numel))).astype(np.float32)
    values = np.abs(values) if name == "exp_avg_sq" else values
    noise = random.integers(0, 1 << 16, numel, dtype=np.uint32)
    codes, scales = encode_int8(values, noise, signed=name == "exp_avg")
    arrays[name][:], arrays[f"{name}.scale"][:] = codes, scales
    read = kept.read_state(arrays, name, slice(0, numel))
    kept.write_state(arrays, name, slice(0, numel), read)
    again = kept.read_state(arrays, name, slice(0, numel))
    assert np.array_equal(read.view(np.uint32), again.view(np.uint32))


def test_8_bit_states_take_other_values_to_the_nearest_code():
    kept = RecordFormat(Master.NONE, ADAM, StateFormat.INT8)
    record = torch.zeros(kept.nbytes(1000), dtype=torch.uint8)
    arrays = kept.arrays(record, 1000)
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    kept.write_state(arrays, "exp_avg", slice(0, 1000), values)
    read = kept.read_state(arrays, "exp_avg", slice(0, 1000))
    assert np.abs(read - values).max() <= np.abs(values).max() / 16
    assert np.abs(read / values - 1)[np.abs(values) > 0.1].max() < 0.08
