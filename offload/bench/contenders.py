"""Systems that train in turn, each in a process of its own.

`train_in_turn` is the whole bench of `step`: it starts the systems, measures them in
interleaved rounds, closes them, and adds their rows to the record.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offload.bench.record import Kind, Record, Row
from offload.bench.rounds import Say, interleaved
from offload.config import OffloadConfig
from offload.process import machine
from offload.process.child import Child, ChildFailed
from offload.tiers.errors import ConfigError, PathError
from offload.tiers.units import format_bytes
from offload.train.plain import DTYPES

INSTALL_BENCH = "not installed: pip install 'offload[bench]'"
LLAMA_151M: Mapping[str, Any] = {  # examples/llama-151m.yaml, wherever the package is installed
    "precision": "fp32",
    "budget": {"host": "512MiB", "nvme": "8GiB"},
    "placement": {"activations": {"tier": "device", "checkpoint": True}},
    "optimizer": {"type": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "clip_grad_norm": 1.0,
    "train": {
        "model": {
            "layers": 8, "hidden": 1024, "heads": 16, "mlp": 4096,
            "vocab": 8192, "max_sequence": 256, "tied": False,
        },
        "text": "python", "batch": 2, "sequence": 256,
    },
}  # fmt: skip
_PROCESS_NBYTES = 400 << 20  # interpreter, libraries, activations of a small batch


@dataclass(frozen=True)
class SystemSpec:
    """A system and what its configuration changes. A new system needs only an entry in a list."""

    name: str  # as --systems takes it
    label: str
    kind: Kind
    program: str  # MODULE:CLASS, a `systems.System`
    overrides: tuple[str, ...] = ()
    memory_per_parameter: int = 0  # bytes at most, roughly, in fp32: what fits
    batches: int = 1  # of the configuration's size per step
    in_one_piece: bool = False  # the model gets them as one batch, and splits it itself
    settings: Mapping[str, Any] = field(default_factory=dict)  # what else the class is made with
    requires: str = ""  # a module that may not be installed


OURS = "offload.bench.systems:Ours"
PLAIN = SystemSpec(
    "plain", "plain PyTorch", Kind.PEER, "offload.bench.systems:Plain", memory_per_parameter=22
)


def all_on(tier: str, **others: str) -> tuple[str, ...]:
    """Overrides that put all states on `tier`, except for `others`."""
    homes = {"parameters": tier, "gradients": tier, "optimizer": tier, **others}
    return tuple(f"placement.{name}={home}" for name, home in homes.items())


@dataclass(frozen=True)
class Turn:
    """One turn's measurements; see `systems.Turns`."""

    losses: list[float]
    seconds: float
    forward_backward_s: float
    read_nbytes: int
    written_nbytes: int
    peak_rss_nbytes: int


_MEASURES = ("seconds", "forward_backward_s", "read_nbytes", "written_nbytes")


class Contender:
    """The process of one system. A failure of a peer does not end the bench."""

    def __init__(self, spec: SystemSpec, base: OffloadConfig, folder: Path) -> None:
        """Blocks until the model is built. ChildFailed if the process ends early."""
        self.spec = spec
        self.reason = ""  # why it failed
        self.turns: list[Turn] = []  # the warm-up's, too
        self.losses: list[float] = []  # by step, including those of the warm-up
        config = OffloadConfig.load(base, (*spec.overrides, f"nvme.paths=[{folder}]"))
        here = folder / spec.name
        here.mkdir()
        options = {
            "program": spec.program, "settings": dict(spec.settings), "config": config.to_dict(),
            "batches": max(spec.batches, config.gradient_accumulation_steps),
            "in_one_piece": spec.in_one_piece, "folder": str(here),
        }  # fmt: skip
        self._child = Child(spec.label, "offload.bench.systems:serve", options, here)
        try:
            self._child.answer()
        except BaseException:
            self.kill()
            raise

    def turn(self) -> Turn | None:
        """One turn's measurements. None once it has failed."""
        if self.reason:
            return None
        try:
            self._child.send("turn")
            turn = Turn(**self._child.answer())
        except ChildFailed as error:
            self.kill()
            self._failed(error, "")
            return None
        self.losses += turn.losses
        self.turns.append(turn)
        return turn

    def _failed(self, error: ChildFailed, but: str) -> None:
        """Record a peer's failure; raise one of our own systems, which ends the bench."""
        if self.spec.kind is not Kind.PEER:
            raise error
        self.reason = but or brief(error)

    def close(self) -> None:
        """Let the process end by itself, with its own checks."""
        if self.reason:
            return
        try:
            self._child.close()
        except ChildFailed as error:
            self._failed(error, "measured, but failed when it was closed")

    def kill(self) -> None:
        self._child.kill()

    def row(self, turns: Sequence[Turn | None]) -> Row:
        """The measures of all rounds' turns, and the peak of all turns; or why there are none."""
        done = [turn for turn in turns if turn is not None]
        if len(done) < len(turns):
            return Row(self.spec.label, self.spec.kind, note=self.reason)
        measures = {name: [float(getattr(turn, name)) for turn in done] for name in _MEASURES}
        facts = {"peak_rss_nbytes": float(max(turn.peak_rss_nbytes for turn in done))}
        return Row(self.spec.label, self.spec.kind, measures, facts, self.reason)


def brief(error: ChildFailed) -> str:
    return f"failed: {error.brief}"[:160]


# ---------------------------------------------------------------- which, and of what model
@dataclass(frozen=True)
class StepOptions:
    """`config` None trains the 151 M shape; `systems` empty takes all of the usual ones."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    systems: tuple[str, ...] = ()
    rounds: int = 7


def base_config(config: Path | None, overrides: Sequence[str]) -> OffloadConfig:
    """The configuration of all systems. ConfigError for one that they cannot train alike."""
    base = OffloadConfig.load(config or LLAMA_151M, overrides)
    if base.optimizer.type != "adamw":
        raise ConfigError(
            f"optimizer.type: {base.optimizer.type} has no peers here; set optimizer.type: adamw"
        )
    if base.precision not in DTYPES:
        raise ConfigError(
            f"precision: {base.precision} is not measured here: the loss is not scaled; "
            f"set precision: {' or '.join(DTYPES)}"
        )
    return base


def count_parameters(config: OffloadConfig) -> int:
    """The number of parameters of the configured model, which is built without memory."""
    from offload.gpt import build_meta_model

    return sum(param.numel() for param in build_meta_model(config).parameters())


def wanted(names: Sequence[str], specs: Sequence[SystemSpec]) -> list[SystemSpec]:
    """The systems of these names, each once; without names all of them."""
    known = {spec.name: spec for spec in specs}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--systems: {unknown[0]!r} is unknown; choose from {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


# What else is measured in every round, by name, given the systems and the folder for files. It is
# made after the systems, whose errors show at once, and closed with the stack.
Limits = Callable[[Sequence[Contender], Path, ExitStack], Mapping[str, Callable[[], Any]]]


def train_in_turn(
    record: Record, options: StepOptions, specs: Sequence[SystemSpec], base: OffloadConfig,
    say: Say, limits: Limits | None = None,
) -> tuple[list[Contender], dict[str, list[Any]]]:  # fmt: skip
    """Measure the systems that fit beside each other, and add a row for each to `record`. Returns
    the systems, closed, and the results of `limits` by name and round.

    ChildFailed if one of our own ends early; PathError and ConfigError before anything is started.
    """
    folder = options.folder or machine.swap_folder()
    if not folder.is_dir():
        raise PathError(f"--path: {folder} is not a folder; name one on the disk to be used")
    wanted_specs = wanted(options.systems, specs)
    config = str(options.config or "151 M Llama shape")
    record.options = {**asdict(options), "config": config, "folder": str(folder)}
    record.note_rounds(options.rounds)
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        systems, missing = start(wanted_specs, base, private, stack, say)
        runs: dict[str, Callable[[], Any]] = {s.spec.label: s.turn for s in systems}
        if limits is not None:
            runs |= limits(systems, private, stack)
        results = interleaved(runs, options.rounds, say)
        say("closing")
        for system in systems:
            system.close()
    record.rows += [system.row(results.pop(system.spec.label)) for system in systems]
    record.rows += missing
    return systems, results


def start(
    specs: Sequence[SystemSpec], base: OffloadConfig, folder: Path, stack: ExitStack, say: Say
) -> tuple[list[Contender], list[Row]]:  # fmt: skip
    """The systems that fit beside each other, started, and rows of those that cannot be.
    ChildFailed if one of our own ends early; ConfigError where none is left."""
    systems: list[Contender] = []
    missing: list[Row] = []
    numel, room = count_parameters(base), machine.available_memory_nbytes()
    for spec in specs:
        needed = spec.memory_per_parameter * numel + _PROCESS_NBYTES
        reason = ""
        if needed > room:
            reason = (
                f"left out: needs about {format_bytes(needed)}, and {format_bytes(max(0, room))} "
                "are free; take fewer --systems, or a smaller model"
            )
        elif spec.requires and importlib.util.find_spec(spec.requires) is None:
            reason = INSTALL_BENCH
        else:
            say(f"starting {spec.label}")
            try:
                systems.append(Contender(spec, base, folder))
            except ChildFailed as error:
                if spec.kind is not Kind.PEER:
                    raise
                reason = brief(error)
        if reason:
            missing.append(Row(spec.label, spec.kind, note=reason))
            continue
        room -= needed
        stack.callback(systems[-1].kill)
    if not systems:
        reasons = "".join(f"\n  {row.name}: {row.note}" for row in missing)
        raise ConfigError(f"--systems: none of them can be measured:{reasons}")
    return systems, missing
