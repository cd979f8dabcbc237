"""A logger that has a few steps of a run recorded, and writes them as trace.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.engine import Engine
    from offload.recording import Recording
    from offload.runs.folder import RunFolder

_STEPS = 3  # that are kept
_SETTLING = 2  # recorded and dropped where more follow: their prefetches have just been learnt


class StepRecorder:
    """Records steps of `engine` behind its first one, which learns the order of uses: the third to
    the fifth that follow, or what there is of those before. Without an engine's own recording
    under way."""

    def __init__(self, engine: Engine, folder: RunFolder) -> None:
        self._engine = engine
        self._folder = folder
        self._recording: Recording | None = None
        self._begun = False

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """A step has ended."""
        if not self._begun:
            self._begun = True
            if not self._engine.is_recorded:  # its user's recording is not to be disturbed
                self._recording = self._engine.record(_STEPS)
        elif self._recording is not None and self._recording.ended_steps >= _STEPS + _SETTLING:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if it was not written yet, and record nothing more."""
        self._begun = True
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        if recording.ended_steps:
            self._folder.write_trace(recording.recorded())
