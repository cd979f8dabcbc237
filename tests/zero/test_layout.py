"""Flat buffers and records: where everything lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.zero.layout import ALIGN_NUMEL, lay_out
from offload.zero.records import Master, RecordFormat

shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.booleans()), min_size=1, max_size=8
)


@given(shapes=shapes)
@settings(deadline=None, derandomize=True)
def test_parameters_do_not_overlap_and_trainable_ones_come_first(shapes):
    params = [
        ((f"p{i}",), nn.Parameter(torch.zeros(shape), requires_grad=trainable))
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
    assert {spec.name for spec in layout.params} == {names[0] for names, _ in params}


@given(numel=st.integers(0, 10_000), chunk=st.sampled_from([64, 1024, 4096]))
@settings(deadline=None, derandomize=True)
def test_chunks_tile_the_trainable_part(numel, chunk):
    layout = lay_out([(("p",), nn.Parameter(torch.zeros(numel)))])
    covered = [i for piece in layout.chunks(chunk) for i in piece]
    assert covered == list(range(layout.numel_trainable))


@pytest.mark.parametrize("master", list(Master))
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("numel", [1, 64, 1000])
def test_the_arrays_of_a_record_do_not_overlap(master, amsgrad, numel):
    record_format = RecordFormat(master, amsgrad)
    record = torch.zeros(record_format.nbytes(numel), dtype=torch.uint8)
    arrays = record_format.arrays(record, numel)
    assert [name for name, _ in record_format.fields] == list(arrays)
    for number, array in enumerate(arrays.values(), 1):
        assert array.shape == (numel,)
        assert array.ctypes.data % array.itemsize == 0
        array[:] = number
    for number, array in enumerate(arrays.values(), 1):
        assert np.all(array == number)


def test_split_masters_cost_two_bytes_and_full_ones_four():
    sizes = [RecordFormat(master).nbytes(1 << 20) for master in Master]
    none, split, full = (round(size / (1 << 20)) for size in sizes)
    assert (none, split, full) == (8, 10, 12)
