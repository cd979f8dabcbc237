"""State that is stored in fewer bytes than it is computed with: a codec, and any home."""

from __future__ import annotations

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
from offload.swap.states.state import Codec, State
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
        self.decode(stored, was)
        if not torch.equal(values, was):
            self.encode(values, stored)


class Halves(Updating):
    """fp32 stored as bf16."""

    def stored_nbytes(self, nbytes: int) -> int:
        return nbytes // 2

    def encode(self, values: Tensor, stored: Tensor) -> None:
        stored.view(torch.bfloat16).copy_(values.view(torch.float32))

    def decode(self, stored: Tensor, values: Tensor) -> None:
        values.view(torch.float32).copy_(stored.view(torch.bfloat16))


class Nibbles(Updating):
    """fp32 stored in 4 bits, groups of 64 between their least and their largest value."""

    def stored_nbytes(self, nbytes: int) -> int:
        return nbytes // 8 + nbytes // 4 // 64 * 8

    def _parts(self, stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = stored.numel() // 40
        ends = stored[32 * groups :].view(torch.float32).view(2, groups, 1)
        return stored[: 32 * groups].view(groups, 32), ends[0], ends[1]

    def encode(self, values: Tensor, stored: Tensor) -> None:
        codes, least, step = self._parts(stored)
        rows = values.view(torch.float32).view(-1, 64)
        least.copy_(rows.amin(1, keepdim=True))
        step.copy_((rows.amax(1, keepdim=True) - least) / 15)
        numbers = ((rows - least) / torch.where(step > 0, step, 1.0)).round().to(torch.uint8)
        codes.copy_(numbers[:, :32] | numbers[:, 32:] << 4)

    def decode(self, stored: Tensor, values: Tensor) -> None:
        codes, least, step = self._parts(stored)
        numbers = torch.cat([codes & 15, codes >> 4], dim=1)
        values.view(torch.float32).view(-1, 64).copy_(numbers * step + least)


Make = Callable[..., QuantizedState]
CODECS = {"halves": Halves(), "int4": Nibbles()}


@pytest.fixture(params=["memory", "file"])
def home_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CODECS.values(), ids=list(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    found: Codec = request.param
    return found


@pytest.fixture
def make(home_kind: str, codec: Codec, tmp_path: Path) -> Iterator[Make]:
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
            lease = pool.demand(nbytes, "coded", StateClass.PARAMETERS)
            return MemoryState("coded", nbytes, PAGE_NBYTES, lease)
        slot = Slot("coded", nbytes, StateClass.PARAMETERS, pool, lambda: 1.0)
        return CachedFileState(files, slot, PAGE_NBYTES)

    def one() -> QuantizedState:
        slot = Slot("coded", NBYTES, StateClass.PARAMETERS, pool, lambda: 1.0)
        made.append(QuantizedState(home(codec.stored_nbytes(NBYTES)), codec, slot))
        return made[-1]

    yield one
    for state in made:
        state.close()
    ledger.check_integrity()
    assert ledger.accounts[Tier.HOST].used_nbytes == 0
    files.close()


def values(seed: int = 0) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def rounded(codec: Codec, exact: Tensor) -> Tensor:
    """What is stored of `exact`."""
    exact = exact.contiguous()
    stored = torch.empty(codec.stored_nbytes(exact.nbytes), dtype=torch.uint8)
    codec.encode(exact.view(torch.uint8), stored)
    found = torch.empty_like(exact)
    codec.decode(stored, found.view(torch.uint8))
    assert 0 < float((found - exact).abs().max()) < 0.25  # close, and not exact
    return found


def filled(make: Make, seed: int = 0) -> QuantizedState:
    state = make()
    state.blank().copy_(values(seed).view(torch.uint8))
    state.mark_dirty()
    state.settle()
    return state


def held(state: QuantizedState) -> Tensor:
    return state.tensor().view(torch.float32)


def test_what_is_computed_with_is_what_is_stored_from_the_start(make: Make, codec: Codec) -> None:
    state = filled(make)
    assert torch.equal(held(state), rounded(codec, values()))
    state.slot.evict()
    assert torch.equal(held(state), rounded(codec, values()))


def test_a_slot_that_is_looked_at_is_not_given_up_and_one_that_is_not_may_be(make: Make) -> None:
    state = filled(make)
    view = state.tensor()
    assert not state.slot.can_evict()
    del view
    assert state.slot.can_evict()


def test_a_slot_that_could_not_be_filled_is_not_taken_for_values(
    make: Make, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = filled(make)
    state.slot.evict()

    def cut_short(stored: Tensor, values: Tensor) -> None:
        values.fill_(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(codec), "decode", staticmethod(cut_short))
        with pytest.raises(KeyboardInterrupt):
            state.tensor()
    assert torch.equal(held(state), rounded(codec, values()))


def test_threads_that_want_values_at_once_decode_them_once(
    make: Make, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = filled(make)
    state.slot.evict()
    decode, decoded, begun = type(codec).decode, list[int](), threading.Event()

    def slow(self: Codec, stored: Tensor, values: Tensor) -> None:
        begun.set()
        decoded.append(values.data_ptr())
        threading.Event().wait(0.01)
        decode(self, stored, values)

    monkeypatch.setattr(type(codec), "decode", slow)
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(held(state).clone()))
    other.start()
    begun.wait()
    found.append(held(state).clone())
    other.join()
    assert len(decoded) == 1
    assert torch.equal(found[0], found[1])
    monkeypatch.undo()
    assert torch.equal(found[0], rounded(codec, values()))


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
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(held(state).clone()))
    other.start()
    assert waits.wait(10)
    monkeypatch.undo()
    state._was_decoded = True
    state.prefetch(next_use=-1.0)  # the model's thread
    goes_on.set()
    other.join()
    assert torch.equal(found[0], expected)
    state.slot.evict()
    assert pool.tier.account.used_nbytes == used


def test_a_reserved_slot_is_never_taken_for_values(make: Make, codec: Codec) -> None:
    state = filled(make)
    state.slot.evict()
    state.slot.pool.makes_values = True
    state.prefetch(next_use=-1.0)  # another state's last use decoded
    assert state.slot.held_nbytes
    assert state.residency() is state.home.residency()
    with pytest.raises(StateError, match="no memory that could have been written"):
        state.mark_dirty()
    assert torch.equal(held(state), rounded(codec, values()))


def test_no_update_reads_or_changes_codes(make: Make) -> None:
    state, piece = filled(make), torch.empty(NBYTES, dtype=torch.uint8)
    for call, args in (
        (state.host_piece, (0,)), (state.mark_piece_dirty, (0,)),
        (state.read_piece, (0, piece)), (state.write_piece, (0, piece)),
    ):  # fmt: skip
        with pytest.raises(StateError, match="coded is stored in codes"):
            call(*args)
