"""What happened when: recorded only while asked for, as a trace that Perfetto shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import StateError
from offload.runs.recording import Recording, rows_of
from offload.swap.threads import recorder
from offload.swap.threads.lanes import Lane, WaitFor, profiled
from offload.swap.threads.recorder import MODEL, Event, Recorder
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, seeded
from tests.offload.plain_training import MakeEngine

SMALL = {"host": "1MiB", "nvme": "64MiB"}


def train(engine: Any, steps: int) -> None:
    for tokens in batches(steps):
        engine.module.loss(tokens).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


@pytest.fixture
def recording(make: MakeEngine) -> Recording:
    """Of the last two of four steps."""
    engine = make(seeded(lambda: TinyLM(blocks=12)), NVME, budget=SMALL)
    with engine.record(steps=2) as found:
        train(engine, 4)
    return found


def test_the_last_steps_are_kept_with_what_happened_in_them(recording: Recording) -> None:
    found = recording.recorded()
    assert [step.number for step in found.steps] == [3, 4]
    assert recording.ended_steps == 4
    assert not found.truncated
    start, stop = found.steps[0].start_s, found.steps[-1].stop_s
    assert all(start <= event.start_s <= event.stop_s for event in found.events)
    assert all(event.start_s <= stop for event in found.events)
    lanes = found.lanes()
    assert list(lanes)[:3] == [MODEL, "update thread", "updates"]
    assert {"nvme read", "nvme write"} <= set(lanes)
    moved = [event for row in lanes["nvme write"] for event in row]
    assert all(event.nbytes > 0 for event in moved)
    assert {"blocks.0 parameters", "blocks.1 optimizer chunk 0"} <= {e.name for e in moved}
    assert all(set(held.nbytes) >= {"host", "nvme"} for held in found.held)


def test_the_model_s_thread_goes_from_group_to_group(recording: Recording) -> None:
    (row,) = recording.recorded().lanes()[MODEL]
    names = [event.name for event in row if not event.name.startswith("wait")]
    begin = names.index("forward (model)")
    assert names[begin : begin + 4] == [
        "forward (model)", "forward embed", "forward blocks.0", "forward blocks.1",
    ]  # fmt: skip
    assert {"backward blocks.1", "backward blocks.0", "step", "between steps"} <= set(names)


def test_nothing_is_noted_before_or_after(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM), NVME, budget=SMALL)
    train(engine, 1)
    recording = engine.record(steps=1)
    train(engine, 1)
    recording.stop()
    recording.stop()
    engine.settle()
    before = recording.recorded()
    train(engine, 1)
    assert recording.recorded() == before
    lanes = [*engine._homes.lanes(), *engine.runtime.lanes()]
    assert [lane.recorder for lane in lanes] == [None] * len(lanes)


def test_one_recording_at_a_time(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM), HOST)
    with engine.record(), pytest.raises(StateError, match="recorded already"):
        engine.record()
    for wrong in (0, -1, 1.5, "3", None):
        with pytest.raises(StateError, match="1 or more"):
            engine.record(steps=wrong)  # type: ignore[arg-type]
    engine.record()  # and dropped
    engine.record().stop()


def test_a_recording_outlives_its_engine(make: MakeEngine, tmp_path: Path) -> None:
    engine = make(seeded(TinyLM), NVME, budget=SMALL)
    recording = engine.record()
    train(engine, 1)
    engine.close()
    recording.write(tmp_path / "trace.json")
    recording.stop()
    assert (tmp_path / "trace.json").stat().st_size


def test_a_trace_without_a_step_is_refused(make: MakeEngine, tmp_path: Path) -> None:
    engine = make(seeded(TinyLM), HOST)
    with engine.record() as recording, pytest.raises(StateError, match="no step has ended"):
        recording.write(tmp_path / "trace.json")


def test_memory_is_bounded_and_what_is_left_out_is_said(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MOST_EVENTS", 20)
    monkeypatch.setattr("offload.runs.recording.MOST_EVENTS", 20)
    engine = make(seeded(TinyLM), NVME, budget=SMALL)
    with engine.record(steps=2) as recording:
        train(engine, 2)
    found = recording.recorded()
    assert len(found.events) <= 20
    assert found.truncated
    assert "more than 20 events in 2 steps" in caplog.text


# ---------------------------------------------------------------- the file
def test_a_trace_is_as_the_format_asks(recording: Recording, tmp_path: Path) -> None:
    recording.write(tmp_path / "trace.json", rank=1)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert trace["otherData"]["steps"] == [3, 4]
    events = trace["traceEvents"]
    kinds = {event["ph"] for event in events}
    assert kinds == {"M", "X", "C"}
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"steps", MODEL, "update thread", "nvme read", "nvme write"} <= set(named.values())
    for event in events:
        assert event["pid"] == 1
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["tid"] in named
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    for tid in named:  # complete events of one thread have to nest
        ends: list[float] = []
        of_thread = [e for e in events if e["ph"] == "X" and e["tid"] == tid]
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 0.002:  # rounded to nanoseconds
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 0.002
            ends.append(end)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=30)


@given(spans)
def test_rows_hold_every_event_once_and_none_overlaps_in_part(found: list[tuple[int, int]]) -> None:
    events = [Event("x", str(n), at, at + length) for n, (at, length) in enumerate(found)]
    events.sort(key=lambda event: (event.start_s, -event.stop_s))
    rows = rows_of(events)
    assert sorted(e.name for row in rows for e in row) == sorted(e.name for e in events)
    for row in rows:
        for one in row:
            for other in row:
                apart = one.stop_s <= other.start_s or other.stop_s <= one.start_s
                around = one.start_s <= other.start_s and other.stop_s <= one.stop_s
                within = other.start_s <= one.start_s and one.stop_s <= other.stop_s
                assert apart or around or within


def test_a_recorder_forgets_all_before_its_steps() -> None:
    kept = Recorder(1, dict)
    kept.add("x", "old", 0.0, 1.0)
    kept.end_step(1)
    kept.end_step(2)
    assert not kept.events
    assert [step.number for step in kept.steps] == [2]


def test_the_profiler_shows_phases_by_name(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM), NVME, budget=SMALL)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(engine, 1)
        with Lane(WaitFor.UPDATE).waiting("a group"):
            pass
    names = {event.key for event in profile.key_averages()}
    assert {
        "offload: gather blocks.0", "offload: reduce blocks.0", "offload: wait for update",
    } <= names  # fmt: skip


def test_a_profiler_of_all_threads_shows_updates_and_files(make: MakeEngine) -> None:
    engine = make(seeded(lambda: TinyLM(blocks=12)), NVME, budget=SMALL)
    train(engine, 1)  # the threads are there before anybody looks
    engine.settle()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True),
    ) as profile:
        train(engine, 1)
        engine.settle()
    threads: dict[str, set[int]] = {}
    for event in profile.events():
        phase = event.name.partition(" blocks.")[0].removeprefix("offload: ")
        threads.setdefault(phase, set()).add(event.thread)
    model = threads["gather"] | threads["reduce"]
    updates = threads["update of"]
    files = threads["nvme read of"] | threads["nvme write of"]
    assert not model & updates
    assert not files & (model | updates)


def test_nothing_is_made_where_no_profiler_looks() -> None:
    assert profiled("a") is profiled("b")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiled("a") is not profiled("b")
