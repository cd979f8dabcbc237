"""`engine.watch` for transformers' Trainer, as a callback."""

from collections.abc import Iterable
from typing import Any

import transformers

from offload.loggers import AnyLogger
from offload.optimizers.optimizer import OffloadOptimizer
from offload.runs.watch import Watch
from offload.tiers.errors import ConfigError


class WatchCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """`callbacks=[WatchCallback()]`: shows training and logs its steps, as `Engine.watch` does, in
    place of Trainer's progress bar.

    `tokens`, `loggers`, `show` and `every` are those of `Engine.watch`. A step's loss, and its norm
    before clipping, are known in an `OffloadTrainer`, or with the mixin.
    """

    def __init__(
        self, *, tokens: int | None = None, loggers: Iterable[AnyLogger] = (), show: bool = True,
        every: int | None = None,
    ) -> None:  # fmt: skip
        self._options: dict[str, Any] = {
            "tokens": tokens, "loggers": loggers, "show": show, "every": every,
        }  # fmt: skip
        self._watch: Watch | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Start watching. Raise ConfigError unless the trainer trains through an engine."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate has wrapped it
        if not isinstance(optimizer, OffloadOptimizer):
            raise ConfigError(
                f"WatchCallback: the trainer's optimizer is a {type(optimizer).__name__}, and only "
                "an engine can be watched; use OffloadTrainer, or optimizers=(engine.optimizer, "
                "None)"
            )
        engine: Any = optimizer.engine
        steps = engine.steps_done - state.global_step + state.max_steps
        self._watch = engine.watch(steps=steps, **self._options)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **_: Any
    ) -> None:
        if self._watch is not None and "eval_loss" in (metrics or {}):
            self._watch.log(validation_loss=(metrics or {})["eval_loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()

    def end(self) -> None:
        """Stop watching, also if training ends with an error."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
