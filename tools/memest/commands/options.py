"""The options of memest's commands: each is declared here once, with its text of `--help`."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.tiers.errors import ConfigError


class Format(enum.StrEnum):
    """The format of an answer."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"


def _given(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=text, metavar=metavar)


def _number(panel: str, text: str) -> Any:
    return typer.Option(rich_help_panel=panel, help=text, metavar="N", min=1, max=_MAX_NUMBER)


_MAX_NUMBER = 1 << 32
_MODEL, _WORK, _MACHINE, _ANSWER = "Model", "Work", "Hardware", "Answer"


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """A question to memest. None: not given; hardware that is not given is this machine's."""

    source: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", show_default=False, help="Folder, file or function."),
    ] = None
    params: Annotated[str | None, _given(_MODEL, "Parameters: 7e9, 7B.", metavar="NUMBER")] = None
    layers: Annotated[int | None, _number(_MODEL, "Blocks.")] = None
    hidden: Annotated[int | None, _number(_MODEL, "Width.")] = None
    vocab: Annotated[int | None, _number(_MODEL, "Vocabulary.")] = None

    config: Annotated[Path | None, _given(_WORK, "An offload YAML.", metavar="FILE")] = None
    overrides: Annotated[
        list[str] | None,
        _given(
            _WORK,
            "Set a key of the configuration, for example -o precision=fp32. Repeatable.",
            "-o",
            "--option",
            metavar="KEY=VALUE",
        ),
    ] = None
    batch: Annotated[int | None, _number(_WORK, "Sequences per pass.")] = None
    sequence: Annotated[int | None, _number(_WORK, "Tokens per sequence, in training.")] = None
    inference: Annotated[bool, _given(_WORK, "Generation, not training.", "--inference")] = False
    prompt: Annotated[int | None, _number(_WORK, "Tokens of each prompt.")] = None
    new_tokens: Annotated[int | None, _number(_WORK, "Tokens to generate per prompt.")] = None

    gpu: Annotated[
        str | None, _given(_MACHINE, "24GiB, 'RTX 4090', or none.", metavar="SIZE|NAME")
    ] = None
    ram: Annotated[str | None, _given(_MACHINE, "64GiB.", metavar="SIZE")] = None
    nvme: Annotated[str | None, _given(_MACHINE, "Free disk, 1TiB.", metavar="SIZE")] = None
    ssd: Annotated[str | None, _given(_MACHINE, "'Gen4 SSD', '4 x Gen5 SSD'.", metavar="NAME")] = (
        None
    )
    gpus: Annotated[int | None, _number(_MACHINE, "GPUs per node.")] = None
    nodes: Annotated[int | None, _number(_MACHINE, "Nodes.")] = None

    format: Annotated[
        Format | None, _given(_ANSWER, "Default: by the suffix of --out, else table.")
    ] = None
    out: Annotated[Path | None, _given(_ANSWER, "Write the answer to FILE.", metavar="FILE")] = None
    write: Annotated[
        Path | None, _given(_ANSWER, "Write a configuration to train with.", metavar="FILE")
    ] = None
    force: Annotated[bool, _given(_ANSWER, "Overwrite the file of --write.", "--force")] = False
    no_measure: Annotated[
        bool, _given(_ANSWER, "Leave out times instead of measuring speeds.", "--no-measure")
    ] = False

    @property
    def chosen_format(self) -> Format:
        """The given format, or that of the output file's suffix."""
        if self.format is not None:
            return self.format
        suffix = self.out.suffix.lstrip(".").lower() if self.out is not None else ""
        return Format(suffix) if suffix in ("json", "html") else Format.TABLE

    def check(self) -> None:
        """Raise the first error in the options (ConfigError, PathError), before anything is
        read."""
        self._check_model()
        self._check_work()
        self._check_output()

    def _check_model(self) -> None:
        numbers = {
            "--params": self.params, "--layers": self.layers, "--hidden": self.hidden,
            "--vocab": self.vocab,
        }  # fmt: skip
        stated = [option for option, value in numbers.items() if value is not None]
        if self.source is None and not stated:
            raise ConfigError(
                "which model? name a config.json, a folder, a safetensors file, module:function or "
                "an offload YAML; or give --params 7e9 --layers 32 --hidden 4096"
            )
        if self.source is not None and stated:
            raise ConfigError(
                f"{stated[0]} contradicts the model {self.source}: a model is read or made from "
                "numbers; leave one of them out"
            )

    def _check_work(self) -> None:
        if self.inference:
            what, remedy = "training", "use --prompt and --new-tokens"
            other = {"--sequence": self.sequence}
        else:
            what, remedy = "inference", "add --inference"
            other = {"--prompt": self.prompt, "--new-tokens": self.new_tokens}
        for option, value in other.items():
            if value is not None:
                raise ConfigError(
                    f"{option} {value}: is of {what} alone; {remedy}, or leave it out"
                )

    def _check_output(self) -> None:
        from offload.cli.errors import check_target

        if self.force and self.write is None:
            raise ConfigError(
                "--force: replaces the file of --write; add --write FILE, or leave it out"
            )
        if self.out is not None and self.out == self.write:
            raise ConfigError(f"--out {self.out}: --write names the same file; name two")
        if self.out is not None:
            check_target(self.out, "--out", replace=True)
        if self.write is not None:
            check_target(self.write, "--write", replace=self.force)
