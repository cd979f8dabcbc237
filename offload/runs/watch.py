"""The object that `engine.watch()` returns: it shows the figures of every step and logs them.

    backward   optimizer.step()   watch.log(loss=loss)   forward of the next step
    ├───────────────┤├────────────────────────────────────┤├────────
                    the step's row is made                 it is shown, and given to the loggers

So what the loop logs after a step, or before it, is in that step's row.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from offload.display.plain_text import echo
from offload.display.training import Lines, Run
from offload.loggers import AnyLogger, Logger, closing_all, loggers_of
from offload.process.machine import rank_here, rss_nbytes
from offload.runs.metrics import StepMetrics
from offload.tiers.errors import ConfigError, StateError, UnsupportedError

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")


class Watch:
    """Watches one engine, until `close` or the engine's end. A context manager."""

    def __init__(
        self, engine: Trained, *, steps: int | None = None, tokens: int | None = None,
        loggers: Iterable[AnyLogger] = (), show: bool = True, every: int | None = None,
        display: Lines | None = None, of_folder: Sequence[Logger] = (),
    ) -> None:  # fmt: skip
        """See `Engine.watch`; `display` is shown in place of the usual one. `of_folder` is loggers
        that stay open afterwards."""
        own = loggers_of(loggers)
        for name, value in (("steps", steps), ("tokens", tokens), ("every", every)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"watch({name}={value!r}): a whole number above 0, or None")
        self._is_closed = False
        self._is_first = rank_here() == 0  # of several ranks, the others show and log nothing
        self._engine = weakref.ref(engine)
        self._tokens = tokens
        self._given: dict[str, Any] = {}  # of the step that is under way
        self._passes: torch.Tensor | None = None  # the sum of what `engine.backward` was given
        self._last = time.perf_counter()  # the end of the last step, or of the making of this
        self._ended: float | None = None  # the same, until the next step begins
        self._before: dict[str, float] = {}  # at `_last`
        self._loop_s = 0.0  # since then, before the forward; waits that are known left out
        self._begun = False  # a step
        engine.before_close(self.close)
        if not self._is_first:
            self._outlet = _Outlet([], [], None)
            return
        if show and display is None:
            budgets = {name: t.budget_nbytes for name, t in engine.report().tiers.items()}
            run = Run(engine.steps_done, steps, budgets)
            display = Lines(run, partial(echo, err=True), every)
        self._outlet = _Outlet([*of_folder, *own], own, display)
        self._before = engine.waits()
        self._hook = engine.optimizer.register_step_post_hook(lambda *_: self._stepped())
        self._finalizer = weakref.finalize(self, _end, self._outlet, os.getpid())

    # ---------------------------------------------------------------- for the loop
    def log(
        self, loss: Any = None, *, validation_loss: Any = None, gradient_norm: Any = None,
        tokens: int | None = None, **figures: Any,
    ) -> None:  # fmt: skip
        """Log figures of the step: between its backward and the next step's forward, before or
        after `optimizer.step()`. The last value of a name counts. Values are numbers, or tensors
        with one element.

        `loss` replaces the sum of the losses given to `engine.backward`; `gradient_norm` replaces
        the norm found by the step, which is smaller after the loop's own clipping; `tokens` is this
        step's, of all ranks. Raises UnsupportedError for other values, StateError after `close`.
        """
        if self._is_closed:
            raise StateError(
                "this watch has ended, with its engine or because engine.watch was called again; "
                "log to what that call has returned"
            )
        given = self._given if self._outlet.held is None else self._outlet.held.given
        known = {
            "loss": loss, "validation_loss": validation_loss, "gradient_norm": gradient_norm,
            "tokens": tokens, **figures,
        }  # fmt: skip
        for name, value in known.items():
            if value is not None:
                given[name] = _number(name, value)

    def flush(self) -> None:
        """Show and log the step that has ended now, and not when the next one begins."""
        self._outlet.flush()

    def forward_begins(self) -> None:
        """Begin a step when the model is called."""
        if not self._is_first or not torch.is_grad_enabled():
            return
        engine = self._engine()
        assert engine is not None, "its model is being called"
        if self._ended is not None:
            now = time.perf_counter()
            waited = sum(engine.waits().values()) - sum(self._before.values())
            self._loop_s = max(0.0, now - self._ended - waited)
            self._ended = None
            self._outlet.flush()
        elif not self._begun:
            self._last = time.perf_counter()
            self._before = engine.waits()
        self._begun = True

    def passed(self, loss: torch.Tensor) -> None:
        """Add the loss of a backward pass."""
        if self._is_first and loss.numel() == 1:
            loss = loss.detach().reshape(()).clone()  # the loop may change it in place
            self._passes = loss if self._passes is None else self._passes + loss

    def close(self) -> None:
        """Show and log the last step, and close loggers, except a run folder's. Idempotent."""
        engine = self._engine()
        self._is_closed = True
        try:
            if self._is_first and self._finalizer.detach() is not None:
                self._hook.remove()
                self._outlet.close()
        finally:
            if engine is not None and engine.watching is self:
                engine.watching = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- from step to step
    def _stepped(self) -> None:
        """Make the row of a step when the optimizer's step ends."""
        now, engine = time.perf_counter(), self._engine()
        assert engine is not None, "its optimizer makes a step"
        self._outlet.flush()  # where no forward of the whole model was seen
        waited = engine.waits()
        since = {name: seconds - self._before.get(name, 0.0) for name, seconds in waited.items()}
        row = self._row(engine, now, since)
        self._outlet.held = _Held(row, self._given, self._tokens, self._passes)
        self._given, self._passes = {}, None
        self._last = self._ended = now
        self._before, self._loop_s = waited, 0.0

    def _row(self, engine: Trained, now: float, waited: dict[str, float]) -> StepMetrics:
        report = engine.report()
        return StepMetrics.of(
            report, step=engine.steps_done, loss=None,
            lr=float(engine.optimizer.param_groups[0]["lr"]),
            seconds=now - self._last, tokens_per_second=None, rss_nbytes=rss_nbytes(),
            tiers={name: tier.used_nbytes for name, tier in report.tiers.items()},
            moved=dict(report.bytes_moved), waited={**waited, "loop": self._loop_s},
            elapsed_seconds=now - engine.made_at,
        )  # fmt: skip


@dataclass(slots=True)
class _Held:
    """A step that has ended, until the next one begins."""

    row: StepMetrics
    given: dict[str, Any]
    tokens: int | None
    passes: torch.Tensor | None


@dataclass
class _Outlet:
    """The receivers of rows. It does not refer to the engine, so that it can outlive it."""

    loggers: list[Logger]
    own: list[Logger]  # those of them that are closed in the end
    display: Lines | None
    held: _Held | None = None
    has_warned: bool = False

    def flush(self) -> None:
        """Show and log the step that has ended, if there is one."""
        held, self.held = self.held, None
        if held is None:
            return
        given = {name: float(value) for name, value in held.given.items()}
        sum_of_passes = None if held.passes is None else float(held.passes)
        loss, tokens = given.pop("loss", sum_of_passes), given.pop("tokens", held.tokens)
        row = replace(
            held.row, loss=loss, validation_loss=given.pop("validation_loss", None),
            tokens_per_second=None if tokens is None else tokens / held.row.seconds,
            gradient_norm=given.pop("gradient_norm", held.row.gradient_norm), figures=given,
        )  # fmt: skip
        values = row.values()
        if loss is not None and not math.isfinite(loss) and not self.has_warned:
            self.has_warned = True
            _log.warning(
                "the loss of step %d is %s; lower optimizer.lr, or set clip_grad_norm (said once)",
                row.step, loss,
            )  # fmt: skip
        for logger in (*self.loggers, *([self.display] if self.display is not None else [])):
            logger.log(values, row.step)

    def close(self) -> None:
        with closing_all(self.own):
            try:
                self.flush()
            finally:
                if self.display is not None:
                    self.display.close()


def _number(name: str, value: Any) -> Any:
    """Return a number, or a tensor of one on another device, which is not read yet."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item() if value.device.type == "cpu" else value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise UnsupportedError(
            f"watch.log({name}=...) got a {type(value).__name__}{shape}, and a figure is one "
            "number; log its mean, or several figures by name"
        ) from None


def _end(outlet: _Outlet, pid: int) -> None:
    """Close the outlet when the engine is dropped or the program ends."""
    if os.getpid() == pid:
        outlet.close()
