"""States that a device dequantizes, whose streams lag behind: nothing is overwritten before it was
read, and nothing read before it was written."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.errors import StateError
from offload.swap.device.mirrored_state import MirroredState
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.quantized_state import DeviceQuantizedState, QuantizedState
from offload.swap.states.state import State
from offload.tiers.tier import PAGE_NBYTES, Residency
from tests.swap.stream_simulation import weak
from tests.swap.test_device_state import Bench, bench, run

__all__ = ["bench"]


class Halved:
    """A byte of each two is stored; on the host at once, on the device when its stream comes to
    it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def stored_nbytes(self, nbytes: int) -> int:
        return nbytes // 2

    def quantize(self, values: Tensor, stored: Tensor) -> None:
        stored.copy_(values[::2])

    def update(self, values: Tensor, stored: Tensor) -> None:
        self.quantize(values, stored)

    def dequantize(self, stored: Tensor, values: Tensor) -> None:
        into, packed = weak(values).view(-1, 2), weak(stored)[:, None]

        def work() -> None:
            into.copy_(packed.expand(-1, 2))

        on_device = self.bench.device._memory.tensor(0, 1).data_ptr()
        if 0 <= values.data_ptr() - on_device < self.bench.device.account.budget_nbytes:
            self.bench.world.model.put(work)
        else:
            work()


Make = Callable[[str, int, int], QuantizedState]


@pytest.fixture
def make(bench: Bench) -> Make:
    """A state with values of so many pages, filled with a number."""

    def one(name: str, pages: int, fill: int) -> QuantizedState:
        def home(stored: int) -> State:
            lease = bench.host_lease(stored // PAGE_NBYTES)
            kept = MemoryState(name, stored, PAGE_NBYTES, lease)
            return MirroredState(kept, bench.slot(name, stored))

        nbytes = pages * PAGE_NBYTES
        quantizer = Halved(bench)
        stored = home(quantizer.stored_nbytes(nbytes))
        state = DeviceQuantizedState(stored, quantizer, bench.slot(name, nbytes))
        state.host_blank().fill_(fill)
        state.mark_host_dirty()
        return state

    return one


def test_values_are_dequantized_after_they_arrived(bench: Bench, make: Make) -> None:
    seen = bench.reads_on_model_stream(make("first", 4, 3).tensor())
    bench.world.model.synchronize()
    assert torch.equal(seen, torch.full_like(seen, 3))


def test_a_slot_that_is_given_up_is_filled_after_its_last_reader(bench: Bench, make: Make) -> None:
    first, second = make("first", 4, 1), make("second", 4, 2)
    seen = [bench.reads_on_model_stream(first.tensor())]
    seen.append(bench.reads_on_model_stream(second.tensor()))  # there is room for one
    assert first.residency() is not Residency.CLEAN or first.slot.lease is None
    seen.append(bench.reads_on_model_stream(first.tensor()))
    bench.world.model.synchronize()
    assert [int(each[0]) for each in seen] == [1, 2, 1]
    assert all(bool((each == each[0]).all()) for each in seen)


def test_a_copy_into_the_memory_of_values_or_quantized_bytes_waits_for_what_reads_them(
    bench: Bench, make: Make
) -> None:
    quantized = make("quantized", 4, 1)
    seen = bench.reads_on_model_stream(quantized.tensor())
    mirrored = bench.mirrored("mirrored", 8, 9)
    mirrored.prefetch(next_use=None)  # all of the device
    run(bench.links.to_device)
    bench.world.model.synchronize()
    assert torch.equal(seen, torch.full_like(seen, 1))
    assert int(mirrored.tensor()[0]) == 9


def test_what_is_written_on_the_device_is_stored_and_dequantized_again(
    bench: Bench, make: Make
) -> None:
    state = make("state", 2, 5)
    bench.world.model.synchronize()
    view = state.tensor()
    bench.world.model.synchronize()
    view.copy_(torch.arange(view.numel()) % 7)
    state.mark_dirty()
    bench.world.model.synchronize()
    expected = (torch.arange(view.numel()) // 2 * 2 % 7).to(torch.uint8)
    assert torch.equal(state.host_tensor(), expected)
    assert torch.equal(view, expected)


@pytest.fixture
def on_device(bench: Bench) -> QuantizedState:
    """A state with values of 4 pages, filled with 1, that is at home on the device."""
    state = DeviceQuantizedState(
        bench.at_home(2), Halved(bench), bench.slot("state", 4 * PAGE_NBYTES)
    )
    state.host_blank().fill_(1)
    state.mark_host_dirty()
    return state


def test_quantized_bytes_at_home_on_the_device_are_read_and_changed_on_the_host(
    on_device: QuantizedState,
) -> None:
    values = on_device.host_tensor()
    assert values.unique().tolist() == [1]
    values.fill_(2)
    on_device.mark_host_dirty()
    assert on_device.host_tensor().unique().tolist() == [2]


def written_anew(state: QuantizedState) -> None:
    state.tensor()
    state.quantizer.bench.world.model.synchronize()  # type: ignore[attr-defined]
    state.note_use()  # nothing reads the slot any more
    state.host_blank().fill_(2)
    state.mark_host_dirty()


def cut_short(state: QuantizedState) -> None:
    dequantize = state.quantizer.dequantize

    def begin(stored: Tensor, values: Tensor) -> None:
        dequantize(stored, values)
        raise KeyboardInterrupt

    state.quantizer.dequantize = begin  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        state.tensor()


@pytest.mark.parametrize("dequantizes", [written_anew, cut_short])
def test_a_slot_is_given_up_after_the_device_has_dequantized_into_it(
    bench: Bench, on_device: QuantizedState, dequantizes: Callable[[QuantizedState], None]
) -> None:
    dequantizes(on_device)  # the device has not come to it
    mirrored = bench.mirrored("mirrored", 6, 9)
    mirrored.prefetch(next_use=None)  # all of the device beside the home
    run(bench.links.to_device)
    bench.world.model.synchronize()
    assert mirrored.tensor().unique().tolist() == [9]


def test_host_memory_is_of_one_state_at_a_time(make: Make) -> None:
    first, second = make("first", 2, 1), make("second", 2, 2)
    first.host_tensor()
    second.host_tensor()
    with pytest.raises(StateError, match="without host_tensor"):
        first.mark_host_dirty()
    second.mark_host_dirty()
