"""What `memest MODEL` was asked, as given on the command line, and what in it contradicts."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.tiers.errors import ConfigError


class Format(enum.StrEnum):
    """How an answer is written."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"
    PNG = "png"


class Precision(enum.StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Recompute(enum.StrEnum):
    """`placement.activations.checkpoint`."""

    FALSE = "false"
    TRUE = "true"
    SELECTIVE = "selective"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model: a source, or numbers. None: not given."""

    source: str | None = None
    params: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mlp: int | None = None
    vocab: int | None = None
    tied: bool = False

    @property
    def numbers(self) -> dict[str, object]:
        """Those that were given, by option."""
        named = {
            "--params": self.params, "--layers": self.layers, "--hidden": self.hidden,
            "--heads": self.heads, "--kv-heads": self.kv_heads, "--mlp": self.mlp,
            "--vocab": self.vocab, "--tied": self.tied or None,
        }  # fmt: skip
        return {option: value for option, value in named.items() if value is not None}

    def check(self) -> None:
        """ConfigError unless there is one description of a model."""
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


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The configuration, and the input of a step."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    batch: int | None = None
    sequence: int | None = None
    accumulate: int | None = None
    precision: Precision | None = None
    checkpoint: Recompute | None = None

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """`key=value` of every option that is a key of the configuration."""
        named = {
            "precision": self.precision,
            "gradient_accumulation_steps": self.accumulate,
            "placement.activations.checkpoint": self.checkpoint,
        }
        given = {key: value for key, value in named.items() if value is not None}
        for text in self.overrides:
            key = text.partition("=")[0].strip()
            if key in given:
                raise ConfigError(f"-o {text}: {key} is given twice, {given[key]} by its option")
        return (*self.overrides, *(f"{key}={value}" for key, value in given.items()))


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The hardware; what is not given is as on this machine."""

    gpu: str | None = None
    ram: str | None = None
    reserve: str | None = None
    nvme: str | None = None
    ssd: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    profile: str | None = None

    def check(self) -> None:
        """ConfigError where two options say different things."""
        if self.profile is not None and self.gpu is not None:
            raise ConfigError(
                f"--profile {self.profile} contradicts --gpu {self.gpu}: a profile has its GPUs; "
                "leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What becomes of the answer."""

    format: Format | None = None
    out: Path | None = None
    dark: bool = False
    write: Path | None = None
    force: bool = False
    measure: bool = True
    advise: bool = False

    @property
    def chosen(self) -> Format:
        """What was asked for, or what the file's name says."""
        if self.format is not None:
            return self.format
        suffix = self.out.suffix.lstrip(".").lower() if self.out is not None else ""
        return Format(suffix) if suffix in ("json", "html", "png") else Format.TABLE

    def check(self) -> None:
        """ConfigError or PathError for what could not be written in the end."""
        from offload.tools.memest.output import check_target

        for problem in self._problems():
            raise ConfigError(problem)
        if self.out is not None:
            check_target(self.out, "--out", replace=True)
        if self.write is not None:
            check_target(self.write, "--write", replace=self.force)

    def _problems(self) -> Iterator[str]:
        if self.chosen is Format.PNG and self.out is None:
            yield "--format png: where to? add --out FILE.png"
        if self.dark and self.chosen is not Format.PNG:
            yield "--dark: for --format png alone; a page follows what the reader's system prefers"
        if self.force and self.write is None:
            yield "--force: replaces the file of --write; add --write FILE, or leave it out"
        if self.out is not None and self.out == self.write:
            yield f"--out {self.out}: --write names the same file; name two"


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """All of the command line of `memest MODEL`."""

    model: ModelOptions
    work: WorkOptions
    machine: MachineOptions
    output: OutputOptions

    def check(self) -> None:
        """The first thing that is wrong, before anything is read."""
        self.model.check()
        self.machine.check()
        self.output.check()
