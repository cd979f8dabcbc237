"""Each wait, fence and hold of the device's path, removed in turn: a race that the checker finds.

A line of a function is replaced, as if it had never been written, and a program or a training that
needs it is run in a world whose order is checked. Left out are lines without which the order still
holds, because another one keeps it, too:

    MirroredState.can_drop, .transit          a slot that is given up leaves its arrival as a fence
    GradientAccumulator._promote (landed)     the path waits for the last copy before it widens
    GradientAccumulator._opened (landed)      ... before it adds, and no sum goes home meanwhile
    ActivationReturns._copy_piece             a storage is held until it has left, or the model's
        (piece.copied.before_compute)         stream waits for that
    UpdateQueue._finish (weight_writes)       every state keeps its readers from what is on its way;
                                              errors are what waits for the writes
    ChunkBytes.find_in_host_memory            `wait` waits again
    DeviceHomes.close (each stream)           the whole device is waited for, too
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from offload.errors import OffloadError
from offload.memory.device_homes import DeviceHomes
from offload.swap.activations.activation_backlog import Backlog
from offload.swap.activations.activation_returns import ActivationReturns, CopiesInFlight
from offload.swap.activations.activations import ActivationTier
from offload.swap.device.device_home import DeviceHomeState
from offload.swap.device.device_state import MirroredState
from offload.swap.device.fences import Fences, OpenReads
from offload.swap.device.outbox import Outbox
from offload.swap.device.streams import CopyMark, CopyStream, WorkStream, _Watched, _Watcher
from offload.swap.states.file_state import FileState
from offload.zero.gradients.gradient_paths import LeavingPath
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.groups.group import ParamGroup
from offload.zero.step.chunks import ChunkBytes
from offload.zero.step.device_update import DeviceUpdate
from offload.zero.step.update import UpdateQueue
from tests.offload.engine_cases import NVME
from tests.offload.order_cases import (
    SLOT,
    Case,
    half_first,
    on_a_checked_device,
    writing,
)
from tests.swap.order_programs import PROGRAMS, run

pytestmark = pytest.mark.sample(4)

BF16 = {"precision": "bf16"}
ALL_DEVICE = {"parameters": "device", "gradients": "device", "optimizer": "device"}
CASES = {
    "host": Case({}),
    "host, few slots": Case({}, (SLOT, 0)),
    "nvme, few slots": Case(NVME, (SLOT, 0)),
    "nvme, written to": Case(NVME, (SLOT, 0), loop=writing),
    "all on the device": Case(ALL_DEVICE, keys=BF16),
    "... updated in backward": Case(ALL_DEVICE, keys={**BF16, "optimizer": {"in_backward": True}}),
    "... but gradients": Case({**ALL_DEVICE, "gradients": "nvme"}, keys=BF16),
    "optimizer on the device": Case({"optimizer": "device"}, keys=BF16),
    "optimizer on the device, few slots": Case({"optimizer": "device"}, (SLOT, 0), keys=BF16),
    "two passes, one in part": Case({}, accumulate=2, loop=half_first, keys=BF16),
    "two passes on nvme, one in part": Case(NVME, accumulate=2, loop=half_first),
    "activations on the host": Case({"activations": {"tier": "host"}}),
    "activations on nvme": Case({"activations": {"tier": "nvme"}}, (4 * SLOT, 0)),
    "some activations on nvme": Case(
        {"activations": {"tier": "nvme", "checkpoint": "selective"}}, (4 * SLOT, 0)
    ),
}


@dataclass(frozen=True)
class Removed:
    what: str  # is not done any more
    owner: type
    function: str
    line: str  # or a part of one, or several
    seen_in: str  # a program or a case
    instead: str = "pass"
    late_s: float = 2e-3  # how late threads are that have to be waited for


REMOVED = [
    # ---- mirrors
    Removed("the model waits for a mirror's arrival", MirroredState, "tensor",
            "self._arrival.before_compute()", "host"),
    Removed("an update waits for a mirror's arrival", MirroredState, "device_piece",
            "self._arrival.before_compute()", "optimizer on the device, few slots"),
    Removed("a fill waits for readers of its memory", MirroredState, "_fill",
            "after=before", "host, few slots", "after=()"),
    Removed("readers are marked before a slot is filled again", MirroredState, "_fill",
            "self._reads.mark_now(self)", "a mirror that is viewed is filled again"),
    Removed("readers are marked before a slot is given up", MirroredState, "drop",
            "self._reads.mark_now(self)", "a home takes the place of a mirror"),
    Removed("a slot that is given up leaves fences", MirroredState, "drop",
            "(*self._before_copy, self._arrival)", "host, few slots", "()"),
    Removed("... for its readers", MirroredState, "drop",
            "*self._before_copy, self._arrival", "host, few slots", "self._arrival,"),
    Removed("... for its arrival", MirroredState, "drop",
            "*self._before_copy, self._arrival", "a mirror is discarded while it arrives",
            "*self._before_copy,"),
    Removed("a new slot's fences are claimed", MirroredState, "_take_slot",
            "self._links.fences.claim(lease.extent)", "host, few slots", "()"),
    Removed("readers are remembered", MirroredState, "read_until",
            "mark.replacing(self._before_copy)", "host, few slots", "()"),
    Removed("a home in host memory is kept until it is copied", MirroredState, "_fill",
            "keeping(source)", "nvme, few slots", "None"),
    Removed("a home gets its new bytes before they are used", MirroredState, "wrote",
            "source).wait()", "nvme, written to", "source)"),
    Removed("an update waits for the copy of a home", MirroredState, "host_piece",
            "(*found.transfers, self._home_read)", "a home is updated while it is copied",
            "found.transfers"),
    Removed("a reader waits for the copy of a home", MirroredState, "host_tensor",
            "self._home_read.wait()", "a home is changed while it is copied"),
    Removed("a writer waits for the copy of a home", MirroredState, "host_blank",
            "self._home_read.wait()", "a home is changed while it is copied"),
    Removed("settle waits for a mirror's arrival", MirroredState, "settle",
            "self._arrival.wait()", "a mirror is settled"),
    # ---- fences
    Removed("fences are claimed", Fences, "claim",
            "tuple(f.mark for f in self._fences if f.start < stop and start < f.stop)",
            "host, few slots", "()"),
    Removed("fences of other sizes are claimed", Fences, "claim",
            "f.start < stop and start < f.stop", "host, few slots",
            "(f.start, f.stop) == (start, stop)"),
    Removed("fences are retired", Fences, "retire", "for mark in marks", "host, few slots",
            "for mark in ()"),
    Removed("views that were given out are noted", OpenReads, "note",
            "self._readers[id(reader)] = reader", "host, few slots"),
    Removed("what cannot be read any more is marked", OpenReads, "mark",
            "reader.read_until(mark)", "host, few slots"),
    Removed("what is to be written to is marked", OpenReads, "mark_now",
            "reader.read_until(mark_here(self._device))",
            "a mirror that is viewed is filled again"),
    # ---- homes on the device
    Removed("the model waits for the update", DeviceHomeState, "tensor",
            "self._before_here()", "all on the device"),
    Removed("the update waits for a copy into its piece", DeviceHomeState, "device_piece",
            "self._before_here()", "a piece is written then stepped"),
    Removed("a copy to the host waits for one from there", DeviceHomeState, "read_piece",
            "self._before_here()", "a piece is written then read"),
    Removed("a copy from the host waits for one to there", DeviceHomeState, "write_piece",
            "self._before_here()", "a piece is read then written"),
    Removed("a look at a record waits for the update", DeviceHomeState, "host_tensor",
            "self._before_here()", "a record is stepped then looked at"),
    Removed("loading waits for the update", DeviceHomeState, "host_wrote",
            "self._before_here()", "a piece is stepped then loaded"),
    Removed("a copy to look at has arrived", DeviceHomeState, "host_tensor",
            ".wait()", "a record is stepped then looked at", ""),
    Removed("a copy that was loaded has left before it is freed", DeviceHomeState, "host_wrote",
            ".wait()", "a piece is stepped then loaded", ""),
    Removed("a copy to the host is remembered", DeviceHomeState, "read_piece",
            "self._worked(mark)", "a piece is read then computed with"),
    Removed("a copy from the host is remembered", DeviceHomeState, "write_piece",
            "self._worked(mark)", "a piece is written then computed with"),
    Removed("the update's kernels are remembered", DeviceHomeState, "used_device_piece",
            "self._worked(until)", "all on the device"),
    Removed("where a piece is read to is kept", DeviceHomeState, "read_piece",
            "keeping(target)", "buffers of a staged piece are dropped", "None"),
    Removed("where a piece comes from is kept", DeviceHomeState, "write_piece",
            "keeping(source)", "buffers of a staged piece are dropped", "None"),
    Removed("a new home's fences are claimed", DeviceHomeState, "__init__",
            "links.fences.claim(lease.extent)", "a home takes the place of a mirror", "()"),
    Removed("a closed home leaves fences", DeviceHomeState, "close",
            "self._links.fences.retire(self._lease.extent, marks)",
            "a home is closed while the model reads it"),
    Removed("... for the model's stream", DeviceHomeState, "close",
            "(*self._busy, mark_here(self._links.device))",
            "a home is closed while the model reads it", "self._busy"),
    Removed("... for copies", DeviceHomeState, "close",
            "*self._busy, mark_here(self._links.device)",
            "a home is closed while it is copied", "mark_here(self._links.device),"),
    Removed("settle waits for a home's copies", DeviceHomeState, "settle",
            "mark.wait()", "a home is settled"),
    # ---- streams
    Removed("a copy waits for what the current stream was given", CopyStream, "copy",
            "[mark_here(self._device)] if after is None else after", "activations on the host",
            "after or ()"),
    Removed("a copy waits at all", CopyStream, "copy", "mark.before(self._stream)", "host"),
    Removed("each stream waits, not the first alone", CopyMark, "before",
            "stream is self._waiting", "a mirror is read on two streams",
            "self._waiting is not None"),
    Removed("a mark takes the place of those of its own stream", CopyMark, "replacing",
            "mark._stream is not self._stream", "a mirror is read on two streams", "False"),
    Removed("a transfer takes its time", CopyStream, "transfer",
            "self._watcher.watch(mark, what, then)", "host",
            "self._watcher.watch(CopyMark(), what, then)"),
    Removed("a watcher waits", _Watched, "end", "self.mark.wait()", "host"),
    Removed("a stream's end waits for its copies", CopyStream, "close",
            "self._stream.synchronize()", "copies end with their stream"),
    Removed("a stream's end waits for its watcher", _Watcher, "close",
            "thread.join()", "copies end with their stream"),
    Removed("the work's end waits for its kernels", WorkStream, "close",
            "self._stream.synchronize()", "work ends with its stream"),
    Removed("the engine's end waits for the device", DeviceHomes, "close",
            "last_first.callback(accelerator.synchronize, self._device)\n"
            "        last_first.callback(self._update_links.close)\n"
            "        last_first.callback(self.links.close)\n"
            "        last_first.callback(self._stream.close)",
            "homes are closed while all is under way"),
    Removed("the engine waits for what PyTorch did in its memory", DeviceHomes, "__init__",
            "mark_here(device).wait()", "host"),
    # ---- gradients
    Removed("a buffer of the outbox has left when it is filled", Outbox, "take",
            "self._left[self._next].before_compute()", "buffers of an outbox go round"),
    Removed("... or when a pack is put in it", Outbox, "pack",
            "self._left[self._next].before(stream)", "host"),
    Removed("... as was remembered", Outbox, "_went", "self._left[self._next] = mark", "host"),
    Removed("a pack leaves when all streams have filled it", Outbox, "_send_pack",
            "for stream in pack.streams", "a pack is filled on two streams",
            "for stream in pack.streams[1:]"),
    Removed("... the last of them, too", Outbox, "_send_pack",
            "for stream in pack.streams", "a pack is filled on two streams",
            "for stream in pack.streams[:1]"),
    Removed("an accumulator goes home when all has come", LeavingPath, "when_there",
            "return self._outbox.when_left(self._sent(), what, then)", "host",
            "then(); return Transfer.completed(None)"),
    Removed("a gradient is added when the first one has come", LeavingPath, "add",
            "self._sent().wait()", "a gradient is added while the first one leaves"),
    Removed("a sum is widened when it has come", LeavingPath, "widen",
            "self._sent().wait()", "two passes, one in part"),
    Removed("a sum is at home before the next gradient", GradientAccumulator, "_opened",
            "self.state.settle()", "a gradient is added while the sum goes home"),
    Removed("a sum has landed before it is dropped", GradientAccumulator, "_arrive",
            "self.landed.wait()", "gradients are cleared while they go home"),
    Removed("a part of a sum has come before it is dropped", GradientAccumulator, "_arrive",
            'self.name}").wait()', "gradients are cleared while they leave", 'self.name}")'),
    Removed("memory that is being filled is not sent home", FileState, "blank",
            "self._filling = True\n                self._dirty.clear()",
            "memory is short while some is filled",
            "self._dirty = set(range(self.pieces))"),
    # ---- updates
    Removed("an update waits for the model's stream", UpdateQueue, "_begin_group",
            "update.after.before_compute()", "... updated in backward"),
    Removed("an update waits for its gradients", ChunkBytes, "wait",
            "self.before.wait()", "host"),
    Removed("an update waits for what it reads from files", ChunkBytes, "wait",
            "self.arrival.wait()", "a chunk is stepped that arrives from a file"),
    Removed("an update waits for moves of what it finds", ChunkBytes, "wait",
            "self.in_place.wait()", "a chunk is stepped that arrives from a file",
            "self.in_place.view"),
    Removed("readers wait for a pending update", ParamGroup, "wait_for_update",
            "pending.wait()", "host, few slots", late_s=0.02),
    Removed("a kernel waits for what was fetched", DeviceUpdate, "step",
            "fetched.before_compute()", "optimizer on the device"),
    Removed("a copy back waits for the kernel", DeviceUpdate, "_copy_back",
            "after=(stepped,)", "optimizer on the device", "after=()"),
    Removed("the kernels in a home are remembered", DeviceUpdate, "step",
            "part.home.used_device_piece(part.piece, stepped)", "all on the device"),
    Removed("what is fetched has arrived in host memory", DeviceUpdate, "_fetch",
            "part.wait()[", "optimizer on the device", "part.in_place.view["),
    Removed("staging on the device is filled again when it was used", DeviceUpdate, "_fetch",
            "after=before", "optimizer on the device", "after=()"),
    Removed("... as was remembered", DeviceUpdate, "step",
            "self._left[self._next] = left", "optimizer on the device"),
    Removed("a chunk has ended when it is copied back", DeviceUpdate, "step",
            "ended = self._work.links.to_host.transfer(left, what)", "optimizer on the device",
            "ended = Transfer.completed(None)"),
    Removed("a chunk has ended when it was fetched", DeviceUpdate, "step",
            "ended = self._work.links.to_device.transfer(fetched, what)", "... but gradients",
            "ended = Transfer.completed(None)"),
    Removed("a chunk goes home when it has ended", UpdateQueue, "_land",
            "if not ended.done():\n            self._on_device.append((chunk, ended))\n"
            "            continue\n        ended.wait()", "optimizer on the device"),
    Removed("staging in host memory is used again when it has left", UpdateQueue, "_reclaim",
            "(self._leaving[0][1].done() or (block and not reclaimed)):\n"
            "        buffer, writes = self._leaving.popleft()\n        writes.wait()",
            "nvme, few slots", "True:\n        buffer, writes = self._leaving.popleft()"),
    # ---- activations
    Removed("backward waits for an activation's arrival", ActivationReturns, "_fetch_to_device",
            "copy.mark.before_compute()", "activations on the host"),
    Removed("an activation is held until it has left", ActivationTier, "_save",
            "self._copies.hold(DeviceCopy(source, piece.copied, stream), nbytes)",
            "activations on the host"),
    Removed("... or the model waits for that", CopiesInFlight, "hold",
            "oldest.mark.before(oldest.stream)", "activations on the host"),
    Removed("one that dies is held until it has arrived", ActivationTier, "_bury_dead",
            "self._copies.hold(ahead, record.nbytes)",
            "an activation dies on its way back"),
    Removed("it is written to disk when it has left", Backlog, "_write_behind",
            "not piece.copied.done() or ", "activations on nvme", ""),
    Removed("it is copied back when it has been read", ActivationReturns, "_copy_piece",
            "look.wait()", "activations on nvme", "look.view"),
    Removed("its slot is kept until it is copied back", ActivationReturns, "_copy_piece",
            "piece.copied = self._links.to_device.copy(target, source)\n"
            "        return piece.copied",
            "activations on nvme", "return self._links.to_device.copy(target, source)"),
    Removed("it is evicted when it is copied back", Backlog, "_evict",
            " or not piece.copied.done()", "some activations on nvme", ""),
    Removed("a dead one's slot is free when nothing moves it", Backlog, "_reap",
            "mark.done() and ", "activations on the host", ""),
    Removed("... as was remembered", Backlog, "bury",
            "piece.slot, piece.copied)", "activations on the host", "piece.slot, CopyMark())"),
    Removed("without a slot, it is read before it is copied", ActivationReturns, "_copy_unstaged",
            "read.wait()", "an activation is read past a full window"),
    Removed("... and copied before its buffer is freed", ActivationReturns, "_copy_unstaged",
            "mark.wait()", "an activation is read past a full window"),
]  # fmt: skip


def remove(patch: pytest.MonkeyPatch, removed: Removed) -> None:
    """The function without its line, in place of the function."""
    function = inspect.unwrap(inspect.getattr_static(removed.owner, removed.function))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(removed.line) == 1, f"the line has changed:\n{source}"
    source = source.replace(removed.line, removed.instead)
    # `super()` looks for `__class__` in the scopes around
    source = (
        f"def make(__class__):\n{textwrap.indent(source, '    ')}\n    return {function.__name__}"
    )
    annotations = __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    code = compile(source, inspect.getsourcefile(function) or "", "exec", annotations)
    exec(code, vars(sys.modules[function.__module__]), made)
    patch.setattr(removed.owner, removed.function, made["make"](removed.owner))


@pytest.mark.parametrize(
    "removed", REMOVED, ids=lambda each: f"{each.owner.__name__}.{each.function}: {each.what}"
)
def test_a_race_is_found_unless(removed: Removed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    remove(monkeypatch, removed)
    world = on_a_checked_device(monkeypatch)
    world.late_s = removed.late_s
    with suppress(OffloadError):  # such as a wrong checksum
        if removed.seen_in in PROGRAMS:
            run(removed.seen_in, world, tmp_path)
        else:
            CASES[removed.seen_in].train(world, tmp_path)
    assert world.races


@pytest.mark.parametrize("name", list(CASES))
def test_nothing_races_with_all_waits(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    world = on_a_checked_device(monkeypatch)
    CASES[name].train(world, tmp_path)
    assert not world.races, world.order.report()
