"""The training loop of `offload train`: an ordinary PyTorch loop over the public interface."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from rich.console import Console
from torch import nn

from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.display.panel import LossWarning, Run
from offload.gpt import LanguageModel, build_meta_model, evaluating, generate, parameter_count
from offload.loggers import Logger, check_names, closing_all
from offload.memory.tier_manager import compute_device
from offload.planning.machine.preflight import activations_beyond
from offload.process.child import ChildFailed
from offload.process.interrupts import Interrupts, noted_interrupts
from offload.process.machine import peak_rss_nbytes, rss_nbytes
from offload.runs.folder import (
    RunFolder,
    SavedRun,
    check_same_run,
    other_numbers,
    with_choices_of,
)
from offload.runs.forecast import Forecast, forecast, workload_of
from offload.runs.metrics import StepMetrics, StepSeconds
from offload.runs.step_recorder import StepRecorder
from offload.runs.world import FollowersFolder, World
from offload.tiers.errors import CheckpointError, LowMemoryError, OffloadError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.train.batches import Batches
from offload.train.checkpoint_room import checkpoints_beyond
from offload.train.comparison import (
    Process,
    agreement,
    cannot_compare,
    comparison_table,
    run_plain,
)
from offload.train.display import display_on
from offload.train.prediction_watch import PredictionWatch
from offload.train.schedule import lr_factor
from offload.train.summary import (
    MemoryUse,
    in_ram_nbytes,
    moved_line,
    plain_state_nbytes,
    summary_table,
)

if TYPE_CHECKING:
    from offload.engine import Engine

_log = logging.getLogger("offload")

_PUT_OFF = "finishing and saving this step; press Ctrl-C again to quit without saving"
_NOTHING_SAVED = (
    "train.checkpoint_every is 0: nothing is saved, not even at the end, unless Ctrl-C or SIGTERM "
    "stops the run; `-o train.checkpoint_every=100` saves every 100 steps and the last one"
)
_NOISE_LENGTH = 40  # bytes of the sample before training

Initialize = Callable[[nn.Module, OffloadConfig], "Engine"]


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    folder: Path
    first_loss: float
    last_loss: float
    validation_loss: float | None
    steps: int
    memory: MemoryUse


def run(
    config: OffloadConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    console: Console | None = None,
    initialize: Initialize | None = None,
    resume_with: str = "",
) -> RunResult:
    """Train as `config.train` says and leave everything in `folder`.

    Blocks until done. A Ctrl-C or SIGTERM during the steps ends the current one, saves, names
    `resume_with` as the command to resume, and raises KeyboardInterrupt. The engine is closed in
    any case. The folder is made once the engine has accepted the configuration, so that a run that
    cannot start leaves nothing behind.
    """
    config = config.owning_the_loop()
    check_names(config.train.loggers)
    with World.joined(config, compute_device(config)) as world:
        if not world.is_first:
            console = PlainConsole(quiet=True)
            logging.getLogger("offload").setLevel(logging.ERROR)
            folder = FollowersFolder(Path(world.tell("")))
        else:
            world.tell(str(folder.path.absolute()))
        console = console or PlainConsole()
        try:
            return _run(
                config, folder, world, console, initialize, resume=resume, resume_with=resume_with
            )
        finally:
            folder.close()


def _run(
    config: OffloadConfig, folder: RunFolder, world: World, console: Console,
    initialize: Initialize | None, *, resume: bool, resume_with: str,
) -> RunResult:  # fmt: skip
    batches = Batches.of(config, world.rank, world.size)
    checkpoint = _last_checkpoint(config, folder, console) if resume else None
    if checkpoint is not None:
        check_same_run(checkpoint.config, config)
        config = with_choices_of(config, checkpoint.config)
        for warning in other_numbers(checkpoint.config, config):
            _log.warning("%s", warning)
    baseline = rss_nbytes()
    torch.manual_seed(config.seed)
    model = build_meta_model(config)
    parameters = parameter_count(model)
    _announce(console, config, parameters, batches, world)
    config, found = _choose(config, world)
    if found is not None and config.train.checkpoint_every:
        for warning in checkpoints_beyond(found, config, folder.checkpoints):
            _log.warning("%s", warning)
    with (
        noted_interrupts() as interrupts,
        (initialize or _default_initialize())(model, config) as engine,
    ):
        folder.make()
        folder.write_config(engine.config)
        watch = PredictionWatch(folder, console, found, engine, config.train.steps)
        console.print(f"run folder: {folder.path}", soft_wrap=True)
        trainer = Trainer(
            config, folder, console, model, engine, batches, world, baseline, parameters,
            interrupts, watch, resume_with,
        )  # fmt: skip
        if checkpoint is not None:
            trainer.restore(checkpoint)
        return trainer.train()


def _last_checkpoint(config: OffloadConfig, folder: RunFolder, console: Console) -> SavedRun | None:
    """Return the last checkpoint, or None for a run that was killed before it saved one."""
    try:
        return folder.latest_checkpoint()
    except CheckpointError:
        if folder.has_checkpoints() or not config.train.checkpoint_every:
            raise
    console.print("nothing was saved there yet: the run begins anew", style="yellow")
    return None


def _choose(config: OffloadConfig, world: World) -> tuple[OffloadConfig, Forecast | None]:
    """Resolve open settings as the first rank does: every rank has to take the same steps."""
    found = None
    if world.is_first:
        meta = build_meta_model(config)
        found = forecast(config, meta, workload_of(config), world.sharding)
    if found is not None:
        best = found.solution.best
        for warning in activations_beyond(best.plan, best.passing_nbytes):
            _log.warning("%s", warning)
    chosen = config.settled() if found is None else found.config
    if world.size == 1:
        return chosen, found
    said = world.tell(chosen.to_yaml())
    return OffloadConfig.load(yaml.safe_load(said)), found


class Trainer:
    """One run in progress."""

    def __init__(
        self, config: OffloadConfig, folder: RunFolder, console: Console, model: LanguageModel,
        engine: Engine, batches: Batches, world: World, baseline_nbytes: int, parameters: int,
        interrupts: Interrupts, watch: PredictionWatch, resume_with: str,
    ) -> None:  # fmt: skip
        self._config = config
        self._train = config.train
        self._folder = folder
        self._console = console
        self._model = model
        self._parameters = parameters
        self._engine = engine
        self._batches = batches
        self._world = world
        self._baseline_nbytes = baseline_nbytes
        self._steps_done = 0
        self._rows: list[StepMetrics] = []  # of this run, without what was resumed
        self._interrupts = interrupts
        self._watch = watch
        self._resume_with = resume_with
        self._resumed_step = 0  # 0: this run has begun anew
        self._pruned_step = 0  # of the last checkpoint when the others were pruned
        self._began = time.perf_counter()

    def restore(self, saved: SavedRun) -> None:
        """Resume from a checkpoint; if its bytes are damaged, from the one before."""
        saved = self._loaded(saved)
        self._steps_done = self._resumed_step = saved.step
        self._prune()  # a kill left others
        self._console.print(f"resumed after step {saved.step} from {saved.path}", soft_wrap=True)

    def _loaded(self, saved: SavedRun) -> SavedRun:
        try:
            self._engine.load_checkpoint(saved.path)
        except CheckpointError as error:
            try:
                older = self._folder.latest_checkpoint(before=saved.step)
                _log.warning("%s; trying %s", error, older.path)
                found = self._loaded(older)
            except CheckpointError:
                raise error from None
            self._folder.set_aside(saved.path)
            return found
        return saved

    def train(self) -> RunResult:
        """Train all remaining steps, with the samples, files and tables around them."""
        start, steps = self._steps_done, self._train.steps
        loggers = self._folder.loggers(start, self._train.loggers)
        if start < steps:
            self._watch.begin()
            if not self._train.checkpoint_every:
                self._console.print(_NOTHING_SAVED)
        else:
            self._console.print(
                f"nothing to do: {start} of {steps} steps are done; raise train.steps to go on"
            )
        with closing_all(loggers):
            if start == 0:
                self._sample("before")
            self._interrupts.check()
            try:
                self._train_steps(loggers, start)
            except KeyboardInterrupt:
                report = self._engine.report()
                self._complete_save()
                self._watch.ended(report, all_saved=self._saved_step == self._steps_done)
                self._say_interrupted()
                raise
        self._sample("after")
        return self._finish()

    def _train_steps(self, loggers: list[Logger], start: int) -> None:
        """Train the steps. Raise KeyboardInterrupt after a Ctrl-C or SIGTERM, once the last step is
        saved; after a second one, raise it at once."""
        tiers = self._engine.report().tiers
        budgets = {name: tier.budget_nbytes for name, tier in tiers.items()}
        display = display_on(self._console, Run(start, self._train.steps, budgets))
        warning = LossWarning(self._warn)
        self._began = time.perf_counter()
        recorder = StepRecorder(self._engine, self._folder)
        put_off = self._interrupts.put_off(_PUT_OFF if self._world.is_first else "")
        with closing(display), closing(recorder), put_off:
            for step in range(start, self._train.steps):
                metrics = self._step_or_save(step)
                self._rows.append(metrics)
                for logger in (*loggers, display, warning, self._watch, recorder):
                    logger.log(metrics.values(), metrics.step)
                stops = bool(self._world.greatest(self._interrupts.seen))
                self._checkpoint_if_due(now=stops)
                if stops:
                    raise self._interrupts.error()
        self._interrupts.check()  # one that came behind the last look

    def _complete_save(self) -> None:
        """Wait for a save that is under way; another Ctrl-C abandons it."""
        try:
            if not self._engine.checkpoint_saved(wait=False):
                self._console.print("a checkpoint is being completed; Ctrl-C: it is given up")
                self._engine.close("drop")  # the run has ended: what is wanted was saved
        except KeyboardInterrupt:
            _log.info("a checkpoint was given up")  # the run ends by the one before
        except OffloadError as error:
            self._warn(f"a checkpoint was not saved: {error}")

    def _say_interrupted(self) -> None:
        done, steps, saved = self._steps_done, self._train.steps, self._saved_step
        text = f"interrupted after step {done} of {steps}; "
        if saved:
            text += "" if saved == done else f"step {done} is not saved; "
            path = self._folder.checkpoint_path(saved)
            text += f"the checkpoint of step {saved} is in\n  {path}\nTo go on from there:"
            text += f"\n  {self._resume_with}"
        else:
            text += "nothing was saved"
        self._console.print(text, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def _step_or_save(self, step: int) -> StepMetrics:
        """Take a step. If memory is too low, save the steps before it and raise LowMemoryError."""
        try:
            return self._step(step)  # which draws no random numbers
        except LowMemoryError:
            if self._steps_done == step:  # else it was refused in the validation after it
                self._engine.optimizer.zero_grad()  # of passes before the one that was refused
            self._checkpoint_if_due(now=True)
            self._say_interrupted()
            raise

    def _step(self, step: int) -> StepMetrics:
        began, before = time.perf_counter(), StepSeconds.until_now(self._engine)
        lr = self._config.optimizer.lr * lr_factor(self._train.schedule, step, self._train.steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        loss = self._accumulate(step)
        self._engine.optimizer.step()
        self._engine.optimizer.zero_grad()
        self._steps_done = step + 1
        seconds, now = time.perf_counter() - began, StepSeconds.until_now(self._engine)
        return self._measure(loss, lr, seconds, now.since(before))

    def _accumulate(self, step: int) -> float:
        micro_steps = self._config.gradient_accumulation_steps
        total = 0.0
        for micro_step in range(micro_steps):
            output = self._model(*self._batches.train_at(step, micro_step))
            loss = output.loss / micro_steps
            del output  # the logits are not needed during backward
            self._engine.backward(loss)
            total += float(loss.detach())
        return total

    def _measure(self, loss: float, lr: float, seconds: float, spent: StepSeconds) -> StepMetrics:
        report, world = self._engine.report(), self._world
        elapsed = time.perf_counter() - self._began
        tokens = self._train.batch * self._train.sequence * world.size
        tokens *= self._config.gradient_accumulation_steps
        loss, seconds = world.mean(loss), world.greatest(seconds)
        return StepMetrics(
            step=self._steps_done,
            loss=loss,
            lr=lr,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            gradient_norm=report.gradient_norm,
            skipped_steps=report.skipped_steps,
            rss_nbytes=int(world.greatest(rss_nbytes())),
            tiers={tier.value: report.tiers[tier].used_nbytes for tier in Tier},
            moved=dict(report.bytes_moved),
            waited=spent.waited,
            links=spent.links,
            elapsed_seconds=elapsed,
            validation_loss=self._validation_loss_if_due(),
        )

    def _validation_loss_if_due(self) -> float | None:
        every, last = self._train.evaluate_every, self._steps_done == self._train.steps
        if self._batches.validation is None or not (
            last or (every and not self._steps_done % every)
        ):
            return None
        with torch.no_grad(), evaluating(self._model):
            losses = [
                float(self._model(*self._batches.validation_at(index)).loss)
                for index in range(self._train.evaluate_batches)
            ]
        return sum(losses) / len(losses)

    def _checkpoint_if_due(self, *, now: bool) -> None:
        """Save if due, beside the following steps; with `now`, and after the last step, the save is
        complete on return. A background save that has failed is repeated at once."""
        every, done = self._train.checkpoint_every, self._steps_done
        last = done == self._train.steps
        due = now or bool(every and (last or not done % every))
        try:
            self._engine.checkpoint_saved(wait=due)
        except OffloadError as error:
            self._warn(f"a checkpoint was not saved: {error}; step {done} is saved instead")
            due = now = True
        self._prune()
        if not due or done == self._saved_step:
            return
        self._folder.metrics.flush()  # a run that goes on from there finds all steps before it
        self._engine.save_checkpoint(
            self._folder.checkpoint_path(done), state={"step": done},
            wait=now or last or self._world.size > 1,  # ranks would wait all the same, and say so
        )  # fmt: skip
        self._prune()

    @property
    def _saved_step(self) -> int:
        """The step of the last complete checkpoint; 0 if there is none."""
        saved = self._engine.last_checkpoint
        return self._resumed_step if saved is None else saved.step

    def _prune(self) -> None:
        """Remove old checkpoints once there is another complete one."""
        saved = self._saved_step
        if saved != self._pruned_step:
            self._folder.keep(self._train.keep_last, self._train.keep_every)
            self._pruned_step = saved

    def _sample(self, when: str) -> None:
        sample = self._train.sample
        if sample.length == 0:
            return
        prompt = sample.prompt.encode()
        # what an untrained model writes is soon seen, and each byte reads all parameters
        length = min(sample.length, _NOISE_LENGTH) if when == "before" else sample.length
        text = generate(
            self._model, prompt, length, temperature=sample.temperature,
            seed=self._config.seed, device=self._batches.device,
        )  # fmt: skip
        self._console.print(f"\ntext {when} training:", style="bold")
        self._console.print(readable(text).rstrip("\n") + "\n", soft_wrap=True)

    def _finish(self) -> RunResult:
        report = self._engine.report()
        memory = MemoryUse(self._baseline_nbytes, peak_rss_nbytes())
        rows = self._folder.metrics.read() if self._world.is_first else self._rows
        if not rows:  # a rank that is not the first, with nothing left to do
            return RunResult(self._folder.path, math.nan, math.nan, None, self._steps_done, memory)
        self._watch.ended(report)
        plain = self._plain()
        config, parameters = self._engine.config, None if plain else self._parameters
        self._console.print(summary_table(config, report, memory, parameters))
        self._console.print(moved_line(report.bytes_moved), soft_wrap=True)
        if report.skipped_steps:
            self._console.print(f"{report.skipped_steps} steps skipped: gradients not finite")
        self._console.print(_loss_line(rows))
        if plain is not None:
            held = in_ram_nbytes(config, report), report.tiers["nvme"].peak_nbytes
            self._console.print()
            self._console.print(comparison_table(Process(rows, memory, *held), plain))
            self._console.print(agreement(rows, plain.rows))
        self._console.print(f"run folder: {self._folder.path}", soft_wrap=True)
        self._console.print(f"page: {self._folder.page}", soft_wrap=True)
        return RunResult(
            self._folder.path, rows[0].loss, rows[-1].loss, rows[-1].validation_loss,
            self._steps_done, memory,
        )  # fmt: skip

    def _plain(self) -> Process | None:
        """Train the same in plain PyTorch, if that is requested and possible."""
        if not self._train.compare_plain or not self._world.is_first:
            return None
        why_not = cannot_compare(self._config, self._world.size, resumed=self._resumed_step > 0)
        if why_not:
            self._console.print(f"train.compare_plain: {why_not}", soft_wrap=True)
            return None
        self._console.print("the same in plain PyTorch, in a process of its own:", style="bold")
        try:
            return run_plain(self._config, self._folder.plain_metrics, self._console)
        except ChildFailed as error:  # it may need more memory than there is; offload has trained
            self._console.print(f"plain PyTorch {error.brief}", style="yellow", soft_wrap=True)
            return None


def readable(text: bytes) -> str:
    """Decode bytes for a terminal: all but printable ASCII and line breaks becomes `·`."""
    return "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "·" for byte in text)


def _loss_line(rows: list[StepMetrics]) -> str:
    line = f"loss: {rows[0].loss:.3f} -> {rows[-1].loss:.3f} in {len(rows)} steps"
    validation = rows[-1].validation_loss
    return line if validation is None else f"{line}, validation {validation:.3f}"


def _announce(
    console: Console, config: OffloadConfig, parameters: int, batches: Batches, world: World
) -> None:
    states = format_bytes(plain_state_nbytes(config, parameters))
    model = config.train.model
    active = f" ({model.active_numel:,} of them for a token)" if model.experts else ""
    console.print(
        f"model: {model.shape}, {parameters:,} parameters{active}, {config.precision}; "
        f"states under plain PyTorch: {states}",
        soft_wrap=True,
    )
    nbytes = format_bytes(len(batches.training.data))
    console.print(f"text: {config.train.text}, {nbytes} to train on", soft_wrap=True)
    if world.size > 1:
        copies, stage = world.sharding.replicas, config.zero.stage
        groups = f" in {copies} shard groups" if 1 < copies < world.size else ""
        console.print(
            f"ranks: {world.size}{groups}, ZeRO stage {stage}; memory and traffic are of rank 0, "
            f"a pass is {world.size} x {config.train.batch} sequences",
            soft_wrap=True,
        )


def _default_initialize() -> Initialize:
    import offload

    return offload.initialize
