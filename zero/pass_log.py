"""What one pass of the model did that other ranks take part in, to be done again without data."""

from __future__ import annotations

from collections.abc import Callable

from offload.tiers.errors import StateError

Action = Callable[[], object]


class PassLog:
    """Actions of the pass under way, and of the last one that gave gradients."""

    def __init__(self) -> None:
        self._under_way: list[Action] | None = None  # None: between passes
        self._gave_gradients = False  # ... the one under way: it is no evaluation
        self._last: list[Action] = []

    def begin_pass(self) -> None:
        """The model is called."""
        self.end_pass()
        self._under_way = []

    def note(self, action: Action) -> None:
        """`action` was done, if that was in a pass."""
        if self._under_way is not None:
            self._under_way.append(action)

    def note_gradient(self) -> None:
        """The pass under way has a backward."""
        self._gave_gradients = True

    def end_pass(self) -> None:
        """A step is taken, or the model is called again."""
        if self._under_way and self._gave_gradients:
            self._last = self._under_way
        self._under_way = None
        self._gave_gradients = False

    def repeat(self) -> None:
        """Do what the last pass with gradients did. StateError if there was none."""
        self.end_pass()
        if not self._last:
            raise StateError(
                "engine.idle() repeats what this rank did in its last pass, and there was none "
                "yet; give every rank data in the first step"
            )
        for action in self._last:
            action()
