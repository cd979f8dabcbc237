"""Every kind of state, with every kind of home, passes the conformance class."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload.swap.device.device_home import DeviceHomeState
from offload.swap.device.mirrored_state import MirroredState
from offload.swap.device.streams import StreamEvent
from offload.swap.io.requests_and_retries import Operation
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES
from tests.swap.state_conformance import (
    NBYTES,
    PIECE_NBYTES,
    BorrowingConformance,
    FileHomeConformance,
    InPlaceConformance,
    Places,
    StateConformance,
    content,
    fill,
    make_places,
    staging,
)


class TestMemoryState(InPlaceConformance):
    def make(self, places: Places, name: str) -> State:
        return places.in_memory(name)

    def test_the_update_may_stage_its_pieces(self, filled: Callable[[int], State]) -> None:
        state = filled(1)
        staged = staging(state.span(2))
        state.read_piece(2, staged).wait()
        expected = content(1, state.nbytes)
        assert torch.equal(staged, expected[state.span(2)])
        state.write_piece(2, staged.fill_(7)).wait()
        expected[state.span(2)] = 7
        assert torch.equal(state.tensor(), expected)


class TestFileState(BorrowingConformance, FileHomeConformance):
    def pool(self, places: Places) -> SlotPool:
        return places.host

    def make(self, places: Places, name: str) -> State:
        return places.in_file(name)


class OnADevice(StateConformance):
    def test_what_the_device_updated_is_seen_by_the_model_and_at_home(
        self, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        state.tensor()
        self.begin_update(state)
        expected = content(1, state.nbytes)
        expected[state.span(1)] = 7
        piece = state.device_piece(1)
        assert piece is not None
        piece.fill_(7)
        state.used_device_piece(1, StreamEvent())
        if not state.at_home_on_device:  # the caller takes the bytes home, too
            self.update(state, 1, piece)
        del piece
        assert torch.equal(self.computed_with(state), expected)
        assert torch.equal(state.host_tensor(), expected)

    def test_a_piece_that_the_cpu_updated_is_right_on_the_device_or_not_there(
        self, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        state.tensor()
        self.update_all(state, content(2, state.nbytes))
        for piece in range(state.pieces):
            there = state.device_piece(piece)
            if there is not None:
                assert torch.equal(there, content(2, state.nbytes)[state.span(piece)])
        assert state.at_home_on_device is (there is not None)


class TestMirrorOfMemory(BorrowingConformance, OnADevice):
    has_blank = False

    def home(self, places: Places, name: str) -> State:
        return places.in_memory(name)

    def pool(self, places: Places) -> SlotPool:
        return places.device

    def make(self, places: Places, name: str) -> State:
        return MirroredState(self.home(places, name), places.device_slot(name))

    def test_what_the_device_updated_and_did_not_take_home_never_was_after_going_back(
        self, filled: Callable[[int], State]
    ) -> None:
        state, expected = filled(1), content(1, NBYTES)
        undoable = state.undoable()
        assert undoable is not None
        assert undoable.keep_old()
        state.tensor()
        piece = state.device_piece(1)
        assert piece is not None
        piece.fill_(7)
        state.used_device_piece(1, StreamEvent())
        del piece
        undoable.go_back()
        assert torch.equal(self.computed_with(state), expected)
        expected[state.span(1)] = 8
        self.begin_update(state)
        self.update(state, 1, expected[state.span(1)])
        assert torch.equal(self.computed_with(state), expected)


class TestMirrorOfAFile(TestMirrorOfMemory, FileHomeConformance):
    def home(self, places: Places, name: str) -> State:
        return places.in_file(name)


class TestDeviceHomeState(InPlaceConformance, OnADevice):
    def make(self, places: Places, name: str) -> State:
        lease = places.homes.lease(NBYTES, owner=name, state_class=StateClass.PARAMETERS)
        return DeviceHomeState(name, NBYTES, PIECE_NBYTES, lease, places.links)


class TestDeviceRecord(OnADevice):
    def make(self, places: Places, name: str) -> State:
        lease = places.homes.lease(NBYTES, owner=name, state_class=StateClass.OPTIMIZER)
        return DeviceHomeState(name, NBYTES, PIECE_NBYTES, lease, places.links, is_record=True)


@pytest.mark.parametrize("mirrored", [False, True])
def test_what_lies_behind_the_trainable_part_is_written_only_with_all_of_it(
    tmp_path: Path, mirrored: bool
) -> None:
    trainable = 5 * PAGE_NBYTES
    for places in make_places(tmp_path):
        state: State = places.in_file("adapted", trainable=trainable)
        if mirrored:
            state = MirroredState(state, places.device_slot("adapted"))

        def written() -> int:
            state.settle()  # noqa: B023 - called before the next one
            return places.store.backend.moved_nbytes[Operation.WRITE]  # noqa: B023

        expected = content(1, NBYTES)
        fill(state, expected)
        assert written() == NBYTES
        view = state.tensor()
        view[:trainable] = expected[:trainable] = content(2, trainable)
        state.mark_dirty(trainable_only=True)
        assert written() == NBYTES + trainable
        view[:] = expected[:] = content(3, NBYTES)
        state.mark_dirty()
        assert written() == NBYTES + trainable + NBYTES
        del view
        for piece in range(state.pieces):
            found = staging(state.span(piece))
            state.read_piece(piece, found).wait()
            span = state.span(piece)
            assert torch.equal(found[: span.stop - span.start], expected[span])
        state.close()
