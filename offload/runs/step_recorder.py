"""A logger that records a few steps of a run and writes them as trace.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.engine import Engine
    from offload.runs.folder import RunFolder
    from offload.runs.recording import Recording

_STEPS = 3  # that are kept
_SETTLING = 2  # recorded and dropped where more follow: their prefetches have just been learnt


class StepRecorder:
    """Records steps of `engine` after its first one, which learns the order of uses: the third to
    fifth that follow, or the last ones if there are fewer. A recording that the engine's user has
    started takes precedence."""

    def __init__(self, engine: Engine, folder: RunFolder) -> None:
        self._engine = engine
        self._folder = folder
        self._recording: Recording | None = None
        self._begun = False

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Start recording after the first step, and stop after enough steps."""
        if not self._begun:
            self._begun = True
            if not self._engine.is_recorded:  # its user's recording is not to be disturbed
                self._recording = self._engine.record(_STEPS)
        elif self._recording is not None and self._recording.ended_steps >= _STEPS + _SETTLING:
            self.close()

    def close(self) -> None:
        """Write the recording, unless it was written already, and stop recording."""
        self._begun = True
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        if recording.ended_steps:
            self._folder.write_trace(recording.recorded())
