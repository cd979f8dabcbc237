"""State that is stored in fewer bytes than it is computed with: a quantizer, and any home."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.errors import StateError
from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.quantized_state import QuantizedState
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import Quantizer, State
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import PAGE_NBYTES, Tier

NBYTES = 9 * PAGE_NBYTES
NUMEL = NBYTES // 4


class Updating:
    """Stores anew what has changed."""

    def update(self: Any, values: Tensor, stored: Tensor) -> None:
        was = torch.empty_like(values)
        self.dequantize(stored, was)
        if not torch.equal(values, was):
            self.quantize(values, stored)


class Halves(Updating):
    """fp32 stored as bf16."""

    def stored_nbytes(self, nbytes: int) -> int:
        return nbytes // 2

    def quantize(self, values: Tensor, stored: Tensor) -> None:
        stored.view(torch.bfloat16).copy_(values.view(torch.float32))

    def dequantize(self, stored: Tensor, values: Tensor) -> None:
        values.view(torch.float32).copy_(stored.view(torch.bfloat16))


class Nibbles(Updating):
    """fp32 stored in 4 bits, groups of 64 between their minimum and their maximum."""

    def stored_nbytes(self, nbytes: int) -> int:
        return nbytes // 8 + nbytes // 4 // 64 * 8

    def _parts(self, stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = stored.numel() // 40
        ends = stored[32 * groups :].view(torch.float32).view(2, groups, 1)
        return stored[: 32 * groups].view(groups, 32), ends[0], ends[1]

    def quantize(self, values: Tensor, stored: Tensor) -> None:
        codes, minimum, step = self._parts(stored)
        rows = values.view(torch.float32).view(-1, 64)
        minimum.copy_(rows.amin(1, keepdim=True))
        step.copy_((rows.amax(1, keepdim=True) - minimum) / 15)
        numbers = ((rows - minimum) / torch.where(step > 0, step, 1.0)).round().to(torch.uint8)
        codes.copy_(numbers[:, :32] | numbers[:, 32:] << 4)

    def dequantize(self, stored: Tensor, values: Tensor) -> None:
        codes, minimum, step = self._parts(stored)
        numbers = torch.cat([codes & 15, codes >> 4], dim=1)
        values.view(torch.float32).view(-1, 64).copy_(numbers * step + minimum)


Make = Callable[..., QuantizedState]
QUANTIZERS = {"halves": Halves(), "int4": Nibbles()}


@pytest.fixture(params=["memory", "file"])
def home_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=QUANTIZERS.values(), ids=list(QUANTIZERS))
def quantizer(request: pytest.FixtureRequest) -> Quantizer:
    return request.param


@pytest.fixture
def make(home_kind: str, quantizer: Quantizer, tmp_path: Path) -> Iterator[Make]:
    """Makes states over one pool, with room for one slot beside the stored bytes."""
    lock, ledger = threading.RLock(), Ledger()
    host = MemoryTier(Tier.HOST, 24 * PAGE_NBYTES, HostMemory(24 * PAGE_NBYTES), ledger)
    pool = SlotPool(host, lock)
    files = BlockStore(
        [SwapFile(tmp_path)], FileTier(1 << 20, [1.0], ledger), ThreadsBackend(), lock=lock
    )
    made: list[State] = []

    def home(nbytes: int) -> State:
        if home_kind == "memory":
            lease = pool.demand(nbytes, "quantized", StateClass.PARAMETERS)
            return MemoryState("quantized", nbytes, PAGE_NBYTES, lease)
        slot = Slot("quantized", nbytes, StateClass.PARAMETERS, pool, lambda: 1.0)
        return CachedFileState(files, slot, PAGE_NBYTES)

    def one() -> QuantizedState:
        slot = Slot("quantized", NBYTES, StateClass.PARAMETERS, pool, lambda: 1.0)
        made.append(QuantizedState(home(quantizer.stored_nbytes(NBYTES)), quantizer, slot))
        return made[-1]

    yield one
    for state in made:
        state.close()
    ledger.check_integrity()
    assert ledger.accounts[Tier.HOST].used_nbytes == 0
    files.close()


def values(seed: int = 0) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def rounded(quantizer: Quantizer, exact: Tensor) -> Tensor:
    """What is stored of `exact`."""
    exact = exact.contiguous()
    stored = torch.empty(quantizer.stored_nbytes(exact.nbytes), dtype=torch.uint8)
    quantizer.quantize(exact.view(torch.uint8), stored)
    values = torch.empty_like(exact)
    quantizer.dequantize(stored, values.view(torch.uint8))
    assert 0 < float((values - exact).abs().max()) < 0.25  # close, and not exact
    return values


def filled(make: Make, seed: int = 0) -> QuantizedState:
    state = make()
    state.blank().copy_(values(seed).view(torch.uint8))
    state.mark_dirty()
    state.settle()
    return state


def held(state: QuantizedState) -> Tensor:
    return state.tensor().view(torch.float32)


def test_what_is_computed_with_is_what_is_stored(make: Make, quantizer: Quantizer) -> None:
    state = filled(make)
    assert torch.equal(held(state), rounded(quantizer, values()))
    state.slot.evict()
    assert torch.equal(held(state), rounded(quantizer, values()))


def test_a_slot_that_is_looked_at_is_not_given_up_and_one_that_is_not_may_be(make: Make) -> None:
    state = filled(make)
    view = state.tensor()
    assert not state.slot.can_evict()
    del view
    assert state.slot.can_evict()


def test_a_slot_that_could_not_be_filled_is_not_taken_for_values(
    make: Make, quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = filled(make)
    state.slot.evict()

    def cut_short(stored: Tensor, values: Tensor) -> None:
        values.fill_(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(quantizer), "dequantize", staticmethod(cut_short))
        with pytest.raises(KeyboardInterrupt):
            state.tensor()
    assert torch.equal(held(state), rounded(quantizer, values()))


def test_threads_that_want_values_at_once_dequantize_them_once(
    make: Make, quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = filled(make)
    state.slot.evict()
    dequantize, addresses, begun = type(quantizer).dequantize, list[int](), threading.Event()

    def slow(self: Quantizer, stored: Tensor, values: Tensor) -> None:
        begun.set()
        addresses.append(values.data_ptr())
        threading.Event().wait(0.01)
        dequantize(self, stored, values)

    monkeypatch.setattr(type(quantizer), "dequantize", slow)
    seen: list[Tensor] = []
    other = threading.Thread(target=lambda: seen.append(held(state).clone()))
    other.start()
    begun.wait()
    seen.append(held(state).clone())
    other.join()
    assert len(addresses) == 1
    assert torch.equal(seen[0], seen[1])
    monkeypatch.undo()
    assert torch.equal(seen[0], rounded(quantizer, values()))


def test_a_slot_reserved_while_another_thread_waits_for_one_is_not_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = filled(make)
    expected = held(state).clone()
    state.slot.evict()
    pool = state.slot.pool
    used, demand = pool.tier.account.used_nbytes, pool.demand
    waits, goes_on = threading.Event(), threading.Event()

    def late(nbytes: int, owner: str, state_class: StateClass) -> Any:
        waits.set()
        assert goes_on.wait(10)
        return demand(nbytes, owner, state_class)

    monkeypatch.setattr(pool, "demand", late)
    seen: list[Tensor] = []
    other = threading.Thread(target=lambda: seen.append(held(state).clone()))
    other.start()
    assert waits.wait(10)
    monkeypatch.undo()
    state._was_dequantized = True
    state.prefetch(next_use=-1.0)  # the model's thread
    goes_on.set()
    other.join()
    assert torch.equal(seen[0], expected)
    state.slot.evict()
    assert pool.tier.account.used_nbytes == used


def test_a_reserved_slot_is_never_taken_for_values(make: Make, quantizer: Quantizer) -> None:
    state = filled(make)
    state.slot.evict()
    state.slot.pool.makes_values = True
    state.prefetch(next_use=-1.0)  # another state's last use dequantized
    assert state.slot.held_nbytes
    assert state.residency() is state.home.residency()
    with pytest.raises(StateError, match="no memory that could have been written"):
        state.mark_dirty()
    assert torch.equal(held(state), rounded(quantizer, values()))


def test_no_update_reads_or_changes_quantized_bytes(make: Make) -> None:
    state, piece = filled(make), torch.empty(NBYTES, dtype=torch.uint8)
    for call, args in (
        (state.host_piece, (0,)), (state.mark_piece_dirty, (0,)),
        (state.read_piece, (0, piece)), (state.write_piece, (0, piece)),
    ):  # fmt: skip
        with pytest.raises(StateError, match="quantized is stored quantized"):
            call(*args)
