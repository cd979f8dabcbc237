"""The collective actions of one pass of the model, for a rank without data to repeat."""

from __future__ import annotations

from collections.abc import Callable

from offload.tiers.errors import StateError

Action = Callable[[], object]

# No pass is this long: parts of a model are called for ever, with no forward of the whole.
_LONGEST = 1 << 16


class PassLog:
    """Actions of the pass under way, and of the last ones that gave gradients: one that reduced
    them, and one that did not."""

    def __init__(self) -> None:
        self._under_way: list[Action] | None = None  # None: between passes
        self._reduced: bool | None = None  # ... the one under way; None: it is an evaluation
        self._last: dict[bool, list[Action]] = {}

    def begin_pass(self) -> None:
        """Note that the model is called."""
        self.end_pass()
        self._under_way = []

    def note(self, action: Action) -> None:
        """Note `action`, if a pass is in progress."""
        if self._under_way is None:
            return
        self._under_way.append(action)
        if len(self._under_way) > _LONGEST:
            self._under_way = None

    def note_gradient(self, *, reduced: bool) -> None:
        """Note that the pass in progress has a backward."""
        self._reduced = reduced

    def end_pass(self) -> None:
        """Note that a step is taken, or the model is called again."""
        if self._under_way and self._reduced is not None:
            self._last[self._reduced] = self._under_way
        self._under_way = self._reduced = None

    def repeat(self, *, reduced: bool) -> None:
        """Repeat the last pass with gradients, if possible one that reduced them, or did not.
        Raises StateError if there was none."""
        self.end_pass()
        actions = self._last.get(reduced) or self._last.get(not reduced)
        if not actions:
            raise StateError(
                "engine.idle() repeats what this rank did in its last pass, and there was none "
                "yet; give every rank data in the first step"
            )
        for action in actions:
            action()
