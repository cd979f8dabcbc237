"""Systems that train in turn, each in a process of its own.

`train_in_turn` starts the systems, measures them in interleaved rounds, closes them, and adds their
rows to the record.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.bench.record import Kind, Record, Row, Say, interleaved
from offload.bench.systems import Turn
from offload.config import OffloadConfig
from offload.process import machine
from offload.process.child import Child, ChildFailed
from offload.tiers.errors import ConfigError, PathError
from offload.train.plain import DTYPES

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


@dataclass(frozen=True)
class SystemSpec:
    """A system and what its configuration changes. A new system needs only an entry in a list."""

    name: str  # as --systems takes it
    label: str
    kind: Kind
    program: str  # MODULE:CLASS, a `systems.System`
    overrides: tuple[str, ...] = ()
    batches: int = 1  # of the configuration's size per step


OFFLOAD = "offload.bench.systems:Offload"
PLAIN = SystemSpec("plain", "plain PyTorch", Kind.PEER, "offload.bench.systems:Plain")


def all_on(tier: str, **others: str) -> tuple[str, ...]:
    """Overrides that put all states on `tier`, except for `others`."""
    homes = {"parameters": tier, "gradients": tier, "optimizer": tier, **others}
    return tuple(f"placement.{name}={home}" for name, home in homes.items())


_MEASURES = ("seconds", "forward_backward_s", "read_nbytes", "written_nbytes")


class Contender:
    """The process of one system. A peer's failure is noted, one of offload ends the bench."""

    def __init__(self, spec: SystemSpec, base: OffloadConfig, folder: Path) -> None:
        """Blocks until the model is built."""
        self.spec = spec
        self.reason = ""  # why it failed
        self.turns: list[Turn] = []  # the warm-up's, too
        config = OffloadConfig.load(base, (*spec.overrides, f"nvme.paths=[{folder}]"))
        here = folder / spec.name
        here.mkdir()
        options = {
            "program": spec.program, "config": config.to_dict(),
            "batches": max(spec.batches, config.gradient_accumulation_steps), "folder": str(here),
        }  # fmt: skip
        self._child = Child(spec.label, "offload.bench.systems:serve", options, here)
        with self._watched():
            self._child.answer()

    @property
    def losses(self) -> list[float]:
        """The losses of all steps."""
        return [loss for turn in self.turns for loss in turn.losses]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Kill the process if it fails. Raises ChildFailed, unless it is a peer's."""
        try:
            yield
        except BaseException as error:
            self.kill()
            if self.spec.kind is not Kind.PEER or not isinstance(error, ChildFailed):
                raise
            self.reason = f"failed: {error.brief}"[:160]

    def turn(self) -> None:
        """Train a turn; nothing once it has failed."""
        if self.reason:
            return
        with self._watched():
            self._child.send("turn")
            self.turns.append(self._child.answer())

    def close(self) -> None:
        """Kill a peer's process; let offload's end by itself, with its own checks."""
        if self.spec.kind is Kind.PEER:
            self.kill()
        else:
            self._child.close()

    def kill(self) -> None:
        self._child.kill()

    def row(self, rounds: int) -> Row:
        """The measures of the last `rounds` turns, and the peak of all; or why there are none."""
        if self.reason:
            return Row(self.spec.label, self.spec.kind, note=self.reason)
        timed = self.turns[-rounds:]
        measures = {name: [float(getattr(turn, name)) for turn in timed] for name in _MEASURES}
        facts = {"peak_rss_nbytes": float(max(turn.peak_rss_nbytes for turn in self.turns))}
        return Row(self.spec.label, self.spec.kind, measures, facts)


# ---------------------------------------------------------------- options, systems and the model
@dataclass(frozen=True)
class StepOptions:
    """`config` None trains the 151 M shape; `systems` empty takes all of them."""

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
    """Measure the systems beside each other, and add a row for each to `record`. Returns the
    systems, closed, and the results of `limits` by name and round.

    Raises ChildFailed if a process of offload ends early; PathError and ConfigError before anything
    is measured.
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
        systems = []
        for spec in wanted_specs:
            say(f"starting {spec.label}")
            systems.append(Contender(spec, base, private))
            stack.callback(systems[-1].kill)
        if all(system.reason for system in systems):
            reasons = "".join(f"\n  {s.spec.label}: {s.reason}" for s in systems)
            raise ConfigError(f"--systems: none of them can be measured:{reasons}")
        runs: dict[str, Callable[[], Any]] = {s.spec.label: s.turn for s in systems}
        if limits is not None:
            runs |= limits(systems, private, stack)
        results = interleaved(runs, options.rounds, say)
        say("closing")
        for system in systems:
            system.close()
    record.rows += [system.row(options.rounds) for system in systems]
    return systems, results
