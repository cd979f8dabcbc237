"""What happened when: recorded only while asked for, as a trace that Perfetto shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import StateError
from offload.runs.recording import Recording
from offload.swap.threads import recorder
from offload.swap.threads.lanes import Lane, WaitFor
from offload.swap.threads.recorder import MODEL
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
    trace = json.loads(recording.trace())
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) <= 20 + 2
    assert trace["otherData"]["truncated"]
    assert "more than 20 events in 2 steps" in caplog.text


# ---------------------------------------------------------------- the file
def test_a_trace_is_as_the_format_asks(recording: Recording, tmp_path: Path) -> None:
    recording.write(tmp_path / "trace.json", rank=1)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert trace["otherData"] == {"steps": [3, 4], "truncated": False}
    assert recording.ended_steps == 4
    events = trace["traceEvents"]
    kinds = {event["ph"] for event in events}
    assert kinds == {"M", "X", "C"}
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"steps", MODEL, "update thread", "nvme read", "nvme write"} <= set(named.values())
    assert [*named.values()][:4] == ["steps", MODEL, "update thread", "updates"]
    moved = [event for event in events if event.get("cat") == "nvme write"]
    assert all(event["args"]["bytes"] > 0 for event in moved)
    assert {"blocks.0 parameters", "blocks.1 optimizer chunk 0"} <= {e["name"] for e in moved}
    assert {e["name"] for e in events if e["ph"] == "C"} >= {"host holds", "nvme holds"}
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
