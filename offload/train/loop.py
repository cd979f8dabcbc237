"""The training loop of `offload train`: an ordinary PyTorch loop over the public interface."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from rich.console import Console
from torch import nn

from offload.checkpoint import has_steps
from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.display.training import Lines, Run
from offload.gpt import LanguageModel, build_meta_model, evaluating, generate, parameter_count
from offload.loggers import Logger, closing_all
from offload.memory.preflight import activations_beyond, gpu_line
from offload.memory.tier_manager import compute_device
from offload.planning.choice.planner import check_plan
from offload.process.interrupts import Interrupts, noted_interrupts
from offload.process.machine import peak_rss_nbytes, rss_nbytes
from offload.runs.folder import RunFolder, RunRecord, SavedRun, check_same_run, default_path
from offload.runs.forecast import Forecast, forecast, workload_of
from offload.runs.watch import Watch
from offload.runs.world import World
from offload.tiers.errors import CheckpointError, ConfigError, OffloadError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.train.summary import loss_line, moved_line, plain_state_nbytes, summary_table
from offload.train.text import Batches

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


def run_training(file: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool) -> None:
    """Train as the options of `offload train` say. Raise ConfigError before any work."""
    config = OffloadConfig.load(file, overrides)
    if config.written_for is not None:
        config.written_for.refuse()
    if resume and run_dir is None:
        raise ConfigError("--resume: which run? add --run-dir DIR")
    if int(os.environ.get("RANK", "0")):  # of `torchrun`: the first rank has the folder
        folder = RunFolder(run_dir or Path(), writes=False)
    elif resume and run_dir is not None:
        folder = RunFolder.reopen(run_dir)
    else:
        folder = RunFolder.new(run_dir or default_path(file.stem))
    run(config, folder, resume=resume, resume_with=resuming_command(file, overrides, folder.path))


def resuming_command(file: Path, overrides: Sequence[str], run_dir: Path) -> str:
    """Return the shell command that resumes the run, for the current folder."""
    options = [word for override in overrides for word in ("-o", override)]
    words = ["offload", "train", str(file), *options, "--run-dir", str(run_dir), "--resume"]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launcher = "" if ranks == 1 else "torchrun [options as before] -m "
    return launcher + shlex.join(words)


def run(
    config: OffloadConfig, folder: RunFolder, *, resume: bool = False,
    console: Console | None = None, initialize: Initialize | None = None, resume_with: str = "",
) -> None:  # fmt: skip
    """Train as `config.train` says and leave everything in `folder`.

    Blocks until done. A Ctrl-C or SIGTERM during the steps ends the current one, saves, names
    `resume_with` as the command to resume, and raises KeyboardInterrupt. The engine is closed in
    any case. The folder is made once the engine has accepted the configuration, so that a run that
    cannot start leaves nothing behind.
    """
    import offload

    config = config.owning_the_loop()
    with World.joined(config, compute_device(config)) as world:
        told = world.tell(str(folder.path.absolute()))
        if not world.is_first:
            console = PlainConsole(quiet=True)
            logging.getLogger("offload").setLevel(logging.ERROR)
            folder = RunFolder(Path(told), writes=False)
        console = console or PlainConsole()
        with closing(folder):
            _run(
                config, folder, world, console, initialize or offload.initialize, resume=resume,
                resume_with=resume_with,
            )  # fmt: skip


def _run(
    config: OffloadConfig, folder: RunFolder, world: World, console: Console,
    initialize: Initialize, *, resume: bool, resume_with: str,
) -> None:  # fmt: skip
    batches = Batches.of(config, world.rank, world.size)
    saved = last_checkpoint(folder, config, console) if resume else None
    baseline_nbytes = rss_nbytes()
    torch.manual_seed(config.seed)
    model = build_meta_model(config)
    announce(console, config, model, batches, world)
    config, prediction = choose(config, world, console)
    with noted_interrupts() as interrupts, initialize(model, config) as engine:
        folder.make()
        folder.write_config(engine.config)
        console.print(f"run folder: {folder.path}", soft_wrap=True)
        trainer = Trainer(
            config, folder, console, model, engine, batches, world, interrupts, prediction,
            baseline_nbytes, resume_with,
        )  # fmt: skip
        if saved is not None:
            trainer.restore(saved)
        trainer.train()


# ---------------------------------------------------------------- before the first step
def last_checkpoint(folder: RunFolder, config: OffloadConfig, console: Console) -> SavedRun | None:
    """Return the checkpoint to resume from, or None for a run that was killed before it saved one.
    Raise ConfigError if `config` is of another run."""
    try:
        saved = folder.latest_checkpoint()
    except CheckpointError:
        if has_steps(folder.checkpoints) or not config.train.checkpoint_every:
            raise
        console.print("nothing was saved there yet: the run begins anew", style="yellow")
        return None
    check_same_run(saved.config, config)
    return saved


def choose(
    config: OffloadConfig, world: World, console: Console
) -> tuple[OffloadConfig, Forecast | None]:
    """Resolve open settings as the first rank does: every rank has to take the same steps."""
    prediction = None
    if world.is_first:
        meta = build_meta_model(config)
        prediction = forecast(config, meta, workload_of(config), world.sharding)
    if prediction is not None:
        best = prediction.solution.best
        check_plan(best)
        gpu = prediction.planned.memory.places.get(Tier.DEVICE)
        if gpu is not None:
            console.print(gpu_line(gpu), soft_wrap=True)
        for warning in activations_beyond(best.plan, best.passing_nbytes):
            _log.warning("%s", warning)
    chosen = config.settled() if prediction is None else prediction.config
    if world.size > 1:
        chosen = OffloadConfig.load(yaml.safe_load(world.tell(chosen.to_yaml())))
    return chosen, prediction


def announce(
    console: Console, config: OffloadConfig, model: nn.Module, batches: Batches, world: World
) -> None:
    """Print the model, the text and the ranks of a run."""
    parameters = parameter_count(model)
    states, shape = format_bytes(plain_state_nbytes(config, parameters)), config.train.model
    active = f" ({shape.active_numel:,} of them for a token)" if shape.experts else ""
    console.print(
        f"model: {parameters:,} parameters{active}, {config.precision}; "
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


# ---------------------------------------------------------------- the steps
@dataclass
class Trainer:
    """One run in progress."""

    config: OffloadConfig
    folder: RunFolder
    console: Console
    model: LanguageModel
    engine: Engine
    batches: Batches
    world: World
    interrupts: Interrupts
    forecast: Forecast | None
    baseline_nbytes: int
    resume_with: str
    steps_done: int = 0
    resumed_step: int = 0  # 0: this run has begun anew
    pruned_step: int = 0  # of the last checkpoint when the others were pruned

    def __post_init__(self) -> None:
        self.settings = self.config.train
        self.record = RunRecord(self.engine)

    def restore(self, saved: SavedRun) -> None:
        """Resume from a checkpoint. CheckpointError, with the way out, if its bytes are damaged."""
        try:
            self.engine.load_checkpoint(saved.path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; remove {saved.path} to go on from the checkpoint before it"
            ) from error
        self.steps_done = self.resumed_step = saved.step
        self._prune()  # a kill left others
        self.console.print(f"resumed after step {saved.step} from {saved.path}", soft_wrap=True)

    def train(self) -> None:
        """Train all remaining steps, with the samples, files and tables around them."""
        start, steps = self.steps_done, self.settings.steps
        loggers = self.folder.loggers(start)
        if start < steps:
            if self.forecast is not None:
                self.folder.write_prediction(self.forecast.prediction())
            if not self.settings.checkpoint_every:
                self.console.print(_NOTHING_SAVED)
        else:
            self.console.print(
                f"nothing to do: {start} of {steps} steps are done; raise train.steps to go on"
            )
        with closing_all(loggers):
            if start == 0:
                self._sample("before")
            self.interrupts.check()
            try:
                self._train_steps(loggers, start)
            except KeyboardInterrupt:
                measured = self.record.measured()  # saving may close the engine
                self._complete_save()
                saved = self._saved_step == self.steps_done
                self.folder.write_measured(replace(measured, stopped=saved, cut_short=not saved))
                self._say_interrupted()
                raise
        self._sample("after")
        if self.world.is_first:
            self._finish()

    def _train_steps(self, loggers: list[Logger], start: int) -> None:
        """Train the steps. Raise KeyboardInterrupt after a Ctrl-C or SIGTERM, once the last step is
        saved; after a second one, raise it at once."""
        put_off = self.interrupts.put_off(_PUT_OFF if self.world.is_first else "")
        with closing(self._watch([*loggers, self.record], start)) as watch, put_off:
            for step in range(start, self.settings.steps):
                self._step(step)
                watch.flush()
                stops = bool(self.world.greatest(self.interrupts.seen))
                self._checkpoint_if_due(now=stops)
                if stops:
                    raise self.interrupts.error()
        self.interrupts.check()  # one that came behind the last look

    def _watch(self, loggers: list[Logger], start: int) -> Watch:
        tiers, train = self.engine.report().tiers, self.settings
        budgets = {name: tier.budget_nbytes for name, tier in tiers.items()}
        tokens = train.batch * train.sequence * self.world.size
        show = partial(self.console.print, soft_wrap=True)
        self.engine.watching = self.watch = Watch(
            self.engine, tokens=tokens * self.config.gradient_accumulation_steps,
            display=Lines(Run(start, train.steps, budgets), show), of_folder=loggers,
        )  # fmt: skip
        return self.watch

    def _complete_save(self) -> None:
        """Wait for a save that is under way; another Ctrl-C abandons it."""
        try:
            if not self.engine.checkpoint_saved(wait=False):
                self.console.print("a checkpoint is being completed; Ctrl-C: it is given up")
                self.engine.close("drop")  # the run has ended: what is wanted was saved
        except KeyboardInterrupt:
            _log.info("a checkpoint was given up")  # the run ends by the one before
        except OffloadError as error:
            self._warn(f"a checkpoint was not saved: {error}")

    def _say_interrupted(self) -> None:
        done, steps, saved = self.steps_done, self.settings.steps, self._saved_step
        text = f"interrupted after step {done} of {steps}; "
        if saved:
            text += "" if saved == done else f"step {done} is not saved; "
            path = self.folder.checkpoint_path(saved)
            text += f"the checkpoint of step {saved} is in\n  {path}\nTo go on from there:"
            text += f"\n  {self.resume_with}"
        else:
            text += "nothing was saved"
        self.console.print(text, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def _step(self, step: int) -> None:
        lr = self.config.optimizer.lr * self.settings.schedule.factor(step, self.settings.steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        loss = self._accumulate(step)
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        self.steps_done = step + 1
        self.watch.log(self.world.mean(loss))
        self.watch.log(validation_loss=self._validation_loss_if_due())

    def _accumulate(self, step: int) -> float:
        micro_steps = self.config.gradient_accumulation_steps
        total = 0.0
        for micro_step in range(micro_steps):
            output = self.model(*self.batches.train_at(step, micro_step))
            loss = output.loss / micro_steps
            del output  # the logits are not needed during backward
            self.engine.backward(loss)
            total += float(loss.detach())
        return total

    def _validation_loss_if_due(self) -> float | None:
        every, last = self.settings.evaluate_every, self.steps_done == self.settings.steps
        if self.batches.validation is None or not (last or (every and not self.steps_done % every)):
            return None
        with torch.no_grad(), evaluating(self.model):
            losses = [
                float(self.model(*self.batches.validation_at(index)).loss)
                for index in range(self.settings.evaluate_batches)
            ]
        return sum(losses) / len(losses)

    def _checkpoint_if_due(self, *, now: bool) -> None:
        """Save if due, beside the following steps; with `now`, and after the last step, the save is
        complete on return. A background save that has failed is repeated at once."""
        every, done = self.settings.checkpoint_every, self.steps_done
        last = done == self.settings.steps
        due = now or bool(every and (last or not done % every))
        try:
            self.engine.checkpoint_saved(wait=due)
        except OffloadError as error:
            self._warn(f"a checkpoint was not saved: {error}; step {done} is saved instead")
            due = now = True
        self._prune()
        if not due or done == self._saved_step:
            return
        self.watch.flush()
        self.folder.metrics.flush()  # a run that goes on from there finds all steps before it
        self.engine.save_checkpoint(
            self.folder.checkpoint_path(done), state={"step": done},
            wait=now or last,
        )  # fmt: skip
        self._prune()

    @property
    def _saved_step(self) -> int:
        """The step of the last complete checkpoint; 0 if there is none."""
        saved = self.engine.last_checkpoint
        return self.resumed_step if saved is None else saved.step

    def _prune(self) -> None:
        """Remove old checkpoints once there is another complete one."""
        saved = self._saved_step
        if saved != self.pruned_step:
            self.folder.keep(self.settings.keep_last, self.settings.keep_every)
            self.pruned_step = saved

    def _sample(self, when: str) -> None:
        sample = self.settings.sample
        if sample.length == 0:
            return
        prompt = sample.prompt.encode()
        # what an untrained model writes is soon seen, and each byte reads all parameters
        length = min(sample.length, _NOISE_LENGTH) if when == "before" else sample.length
        text = generate(
            self.model, prompt, length, temperature=sample.temperature,
            seed=self.config.seed, device=self.batches.device,
        )  # fmt: skip
        self.console.print(f"\ntext {when} training:", style="bold")
        # for a terminal all but printable ASCII and line breaks becomes `·`
        shown = "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "·" for byte in text)
        self.console.print(shown.rstrip("\n") + "\n", soft_wrap=True)

    def _finish(self) -> None:
        report, console = self.engine.report(), self.console
        peak_nbytes = peak_rss_nbytes()
        rows = self.folder.metrics.read()
        self.folder.write_measured(self.record.measured())
        config = self.engine.config
        console.print(summary_table(config, report, self.baseline_nbytes, peak_nbytes, self.model))
        console.print(moved_line(report.bytes_moved), soft_wrap=True)
        if report.skipped_steps:
            console.print(f"{report.skipped_steps} steps skipped: gradients not finite")
        console.print(loss_line(rows))
        console.print(f"run folder: {self.folder.path}", soft_wrap=True)
