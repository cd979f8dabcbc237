"""What `offload train` decides, checks and says before the first step."""

from __future__ import annotations

import logging

import yaml
from rich.console import Console
from torch import nn

from offload.config import OffloadConfig
from offload.gpt import build_meta_model, parameter_count
from offload.planning.machine.preflight import activations_beyond
from offload.runs.folder import RunFolder, SavedRun, check_same_run
from offload.runs.forecast import Forecast, forecast, workload_of
from offload.runs.world import World
from offload.tiers.errors import CheckpointError
from offload.tiers.units import format_bytes
from offload.train.summary import plain_state_nbytes
from offload.train.text import Batches

_log = logging.getLogger("offload")


def last_checkpoint(folder: RunFolder, config: OffloadConfig, console: Console) -> SavedRun | None:
    """Return the checkpoint to resume from, or None for a run that was killed before it saved one.
    Raise ConfigError if `config` is of another run."""
    try:
        saved = folder.latest_checkpoint()
    except CheckpointError:
        if folder.has_checkpoints() or not config.train.checkpoint_every:
            raise
        console.print("nothing was saved there yet: the run begins anew", style="yellow")
        return None
    check_same_run(saved.config, config)
    return saved


def choose(config: OffloadConfig, world: World) -> tuple[OffloadConfig, Forecast | None]:
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
    if world.size > 1:
        chosen = OffloadConfig.load(yaml.safe_load(world.tell(chosen.to_yaml())))
    return chosen, found


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
