"""The options of memest's commands: each is declared here once, with its text of `--help`."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.output import check_target


def _given(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=text, **more)


_MODEL, _WORK, _MACHINE, _ANSWER = "Model", "Work", "Hardware", "Answer"
_SERVE = "Inference"
_SIZE = {"metavar": "SIZE"}
Batch = _given(_WORK, "Sequences per pass.")
Sequence = _given(_WORK, "Tokens of each.")
Inference = _given(_SERVE, "Generating text, not training.", "--inference")
Prompt = _given(_SERVE, "Tokens of each prompt.")
NewTokens = _given(_SERVE, "Tokens to generate for each.")
Storage = _given(_SERVE, "Format of weights at home: int8, int4 or nf4.", metavar="FORMAT")
GroupSize = _given(_SERVE, "Weights that share a scale.")
Gpus = _given(_MACHINE, "GPUs per node.")
Nodes = _given(_MACHINE, "Nodes.")
NoMeasure = _given(
    _ANSWER, "No times, rather than measuring this machine (once, some seconds).", "--no-measure"
)


class Format(enum.StrEnum):
    """The format of an answer."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"


class Precision(enum.StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Recompute(enum.StrEnum):
    """The values of `placement.activations.checkpoint`."""

    FALSE = "false"
    TRUE = "true"
    SELECTIVE = "selective"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model: a source, or numbers. None: not given."""

    source: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", show_default=False, help="Where the model is described."),
    ] = None
    params: Annotated[
        str | None, _given(_MODEL, "Parameters, like 7e9 or 7B.", metavar="NUMBER")
    ] = None
    layers: Annotated[int | None, _given(_MODEL, "Blocks.")] = None
    hidden: Annotated[int | None, _given(_MODEL, "Width.")] = None
    heads: Annotated[int | None, _given(_MODEL, "Attention heads.")] = None
    kv_heads: Annotated[int | None, _given(_MODEL, "Key/value heads.")] = None
    mlp: Annotated[int | None, _given(_MODEL, "Width of the MLP.")] = None
    vocab: Annotated[int | None, _given(_MODEL, "Vocabulary.")] = None
    tied: Annotated[bool, _given(_MODEL, "One matrix for both ends.", "--tied")] = False

    @property
    def numbers(self) -> dict[str, object]:
        """The given numbers, by option."""
        named = {
            "--params": self.params, "--layers": self.layers, "--hidden": self.hidden,
            "--heads": self.heads, "--kv-heads": self.kv_heads, "--mlp": self.mlp,
            "--vocab": self.vocab, "--tied": self.tied or None,
        }  # fmt: skip
        return {option: value for option, value in named.items() if value is not None}

    def check(self) -> None:
        """Raise ConfigError unless there is exactly one description of a model."""
        if self.source is None and not self.numbers:
            raise ConfigError(
                "which model? name a config.json, a folder, a safetensors file, module:function or "
                "an offload YAML; or give --params 7e9 --layers 32 --hidden 4096"
            )
        if self.source is not None and self.numbers:
            raise ConfigError(
                f"{next(iter(self.numbers))} contradicts the model {self.source}: a model is read "
                "or made from numbers; leave one of them out"
            )


def check_work(
    training: Mapping[str, object], generating: Mapping[str, object], *, inference: bool
) -> None:
    """Raise ConfigError for an option, by its name, that was given for the other kind of work."""
    other, what = (training, "training") if inference else (generating, "inference")
    for option, value in other.items():
        if value is not None:
            remedy = "use --prompt and --new-tokens" if inference else "add --inference"
            raise ConfigError(f"{option} {value}: is of {what} alone; {remedy}, or leave it out")


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The configuration, and the input of a step."""

    config: Annotated[
        Path | None, _given(_WORK, "An offload YAML for the model.", metavar="FILE")
    ] = None
    overrides: Annotated[
        list[str] | None,
        _given(
            _WORK,
            "Set a key of the configuration, for example -o placement.optimizer=nvme. Repeatable.",
            "-o", "--option", metavar="KEY=VALUE",
        ),
    ] = None  # fmt: skip
    batch: Annotated[int | None, Batch] = None
    sequence: Annotated[int | None, Sequence] = None
    accumulate: Annotated[int | None, _given(_WORK, "Passes per step.")] = None
    precision: Annotated[Precision | None, _given(_WORK, "Of the weights.")] = None
    checkpoint: Annotated[Recompute | None, _given(_WORK, "Recompute activations.")] = None
    ep_size: Annotated[int, _given(_WORK, "Ranks that share the experts of a layer.")] = 1
    inference: Annotated[bool, Inference] = False
    prompt: Annotated[int | None, Prompt] = None
    new_tokens: Annotated[int | None, NewTokens] = None
    storage: Annotated[str | None, Storage] = None
    group_size: Annotated[int | None, GroupSize] = None
    kv_dtype: Annotated[
        str | None, _given(_SERVE, "Format of the cache: int8.", metavar="FORMAT")
    ] = None

    def check(self) -> None:
        """Raise ConfigError if options of training and of inference are mixed."""
        check_work(
            {
                "--sequence": self.sequence, "--accumulate": self.accumulate,
                "--checkpoint": self.checkpoint,
            },
            {
                "--prompt": self.prompt, "--new-tokens": self.new_tokens,
                "--kv-dtype": self.kv_dtype,
            },
            inference=self.inference,
        )  # fmt: skip

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """Return `key=value` for every option that is a key of the configuration."""
        named = {
            "precision": self.precision,
            "gradient_accumulation_steps": self.accumulate,
            "placement.activations.checkpoint": self.checkpoint,
            "storage.weights": self.storage,
            "storage.group_size": self.group_size,
            "kv.dtype": self.kv_dtype,
        }
        given = {key: value for key, value in named.items() if value is not None}
        overrides = self.overrides or []
        for text in overrides:
            key = text.partition("=")[0].strip()
            if key in given:
                raise ConfigError(f"-o {text}: {key} is given twice, {given[key]} by its option")
        return (*overrides, *(f"{key}={value}" for key, value in given.items()))


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The hardware; what is not given is taken from this machine."""

    gpu: Annotated[
        str | None, _given(_MACHINE, "24GiB, 'RTX 4090', or none.", metavar="SIZE|NAME")
    ] = None
    ram: Annotated[str | None, _given(_MACHINE, "64GiB.", **_SIZE)] = None
    reserve: Annotated[
        str | None,
        _given(
            _MACHINE, "Of --ram, kept for the system (default 2GiB); 0 in a container.", **_SIZE
        ),
    ] = None
    nvme: Annotated[str | None, _given(_MACHINE, "Free disk, 1TiB.", **_SIZE)] = None
    ssd: Annotated[str | None, _given(_MACHINE, "'Gen4 SSD', '4 x Gen5 SSD'.", metavar="NAME")] = (
        None
    )
    gpus: Annotated[int | None, Gpus] = None
    nodes: Annotated[int | None, Nodes] = None
    profile: Annotated[
        str | None, _given(_MACHINE, "A machine of `memest profiles`.", metavar="NAME")
    ] = None

    def check(self) -> None:
        """Raise ConfigError if two options contradict each other."""
        if self.profile is not None and self.gpu is not None:
            raise ConfigError(
                f"--profile {self.profile} contradicts --gpu {self.gpu}: a profile has its GPUs; "
                "leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The destination and the format of the answer."""

    format: Annotated[
        Format | None, _given(_ANSWER, "Default: what --out's name says, else table.")
    ] = None
    out: Annotated[Path | None, _given(_ANSWER, "Instead of standard output.", metavar="FILE")] = (
        None
    )
    write: Annotated[
        Path | None, _given(_ANSWER, "Write a configuration to train with.", metavar="FILE")
    ] = None
    force: Annotated[bool, _given(_ANSWER, "Replace the file of --write.", "--force")] = False
    no_measure: Annotated[bool, NoMeasure] = False
    advise: Annotated[
        bool, _given(_ANSWER, "Say what would make a step faster, too.", "--advise")
    ] = False

    @property
    def chosen(self) -> Format:
        """The given format, or that of the output file's suffix."""
        if self.format is not None:
            return self.format
        suffix = self.out.suffix.lstrip(".").lower() if self.out is not None else ""
        return Format(suffix) if suffix in ("json", "html") else Format.TABLE

    def check(self) -> None:
        """Raise ConfigError or PathError for output that could not be written in the end."""
        for problem in self._problems():
            raise ConfigError(problem)
        if self.out is not None:
            check_target(self.out, "--out", replace=True)
        if self.write is not None:
            check_target(self.write, "--write", replace=self.force)

    def _problems(self) -> Iterator[str]:
        if self.force and self.write is None:
            yield "--force: replaces the file of --write; add --write FILE, or leave it out"
        if self.out is not None and self.out == self.write:
            yield f"--out {self.out}: --write names the same file; name two"


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """All options of `memest MODEL`."""

    model: ModelOptions
    work: WorkOptions
    machine: MachineOptions
    output: OutputOptions

    def check(self) -> None:
        """Raise the first error in the options, before anything is read."""
        self.model.check()
        self.work.check()
        self.machine.check()
        self.output.check()
