"""A recorder of events: spans of time on lanes, for the last few steps. Bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MODEL = "model's thread"
MOST_EVENTS = 100_000


@dataclass(slots=True)
class Event:
    """A span by `time.perf_counter`. Never changed; one that is frozen takes longer to make."""

    lane: str
    name: str
    start_s: float
    stop_s: float
    nbytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes held by each tier at a moment."""

    at_s: float
    nbytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step, from the end of the step before to its own end."""

    number: int  # 1-based, of those that the optimizer took
    start_s: float
    stop_s: float


def shown(name: str) -> str:
    """The displayed name of a group, or of its states: an empty one becomes `(model)`."""
    return name if name.strip() and not name.startswith(" ") else f"(model){name}"


class Recorder:
    """Events of the last `steps` whole steps and of the one under way, at most `MOST_EVENTS`.

    `add` may be called by any thread, the other methods by the model's."""

    def __init__(self, steps: int, held: Callable[[], Mapping[str, int]]) -> None:
        """`held` gives the bytes that each tier holds."""
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.held: deque[Held] = deque(maxlen=MOST_EVENTS)
        self.steps: deque[RecordedStep] = deque(maxlen=steps)
        self.ended_steps = 0
        self.stopped = False
        self._held_now = held
        self._doing = ""
        self._since_s = self._step_began_s = time.perf_counter()

    def add(
        self, lane: str, name: str, start_s: float, stop_s: float, nbytes: int = 0,
        detail: str = "",
    ) -> None:  # fmt: skip
        if self.stopped:  # it has begun before
            return
        self.events.append(Event(lane, shown(name), start_s, stop_s, nbytes, detail))

    def turn_to(self, doing: str) -> None:
        """End the current span of the model's thread and begin one named `doing`."""
        if doing == self._doing:
            return
        now = time.perf_counter()
        if self._doing:
            self.add(MODEL, self._doing, self._since_s, now)
        self._doing, self._since_s = doing, now
        self.held.append(Held(now, self._held_now()))

    def end_step(self, number: int) -> None:
        """Record the end of an optimizer step, and drop what is older than the steps kept."""
        now = time.perf_counter()
        self.steps.append(RecordedStep(number, self._step_began_s, now))
        self._step_began_s = now
        self.ended_steps += 1
        first = self.steps[0].start_s
        while self.events and self.events[0].stop_s < first:
            self.events.popleft()
        while self.held and self.held[0].at_s < first:
            self.held.popleft()
