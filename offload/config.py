"""The configuration: frozen models, one per section, composed into `OffloadConfig`.

What can be judged without looking at the machine is judged here; whether a path exists or a budget
fits is judged when the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from offload.config_errors import render
from offload.config_fields import (
    AutoBool,
    AutoChunk,
    AutoDepth,
    AutoThreads,
    Budget,
    KeyedError,
    Percent,
    Split,
    Tier,
    TierSplit,
)
from offload.config_file import dump_yaml
from offload.config_source import ConfigSource, load_source
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.units import round_up
from offload.train.config import TrainConfig

__all__ = ["OffloadConfig", "Percent", "Tier", "TierSplit"]

AUTO_CHUNK_NUMEL = 1 << 20

_MASTER_OF = {"fp32": "none", "bf16": "split", "fp16": "fp32"}
_MASTERS_ALLOWED = {"fp32": ("none",), "bf16": ("split", "fp32"), "fp16": ("fp32",)}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class BudgetConfig(_Section):
    """Most bytes each tier may hold."""

    device: Budget = Field(None, description="Device memory: bytes, 8GiB, 80%, or auto.")
    host: Budget = Field(None, description="RAM: bytes, 6GiB, 50%, or auto.")
    nvme: Budget = Field(None, description="Swap files: bytes, 100GiB, 50% of free, or auto.")


class NvmeConfig(_Section):
    """Where and how the nvme tier is read and written."""

    paths: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        (), description="Folders for swap files; several are striped. Empty: a temporary folder."
    )
    backend: Literal["auto", "threads", "libaio"] = Field(
        "auto", description="I/O backend; auto takes the fastest that works."
    )
    threads: AutoThreads = Field("auto", description="I/O threads per path, or auto.")
    checksum: bool = Field(True, description="Check an XXH3 sum of every block read.")
    direct: AutoBool = Field(
        "auto", description="O_DIRECT: true demands it, false never uses it, auto where it works."
    )

    @model_validator(mode="after")
    def _check_threads(self) -> Self:
        if self.threads != "auto" and self.backend == "libaio":
            raise KeyedError(
                f"threads: {self.threads} contradicts backend: libaio, which has no worker "
                "threads; remove threads, or set backend: threads",
                ("threads",),
                ("backend",),
            )
        return self


class ActivationConfig(_Section):
    """Where saved activations live, and whether they are kept or recomputed."""

    tier: Literal["device", "host", "nvme"] = Field(
        "device", description="Tier of saved activations; only device for now."
    )
    checkpoint: bool = Field(
        False, description="Recompute each block's activations in backward (built-in models)."
    )

    @model_validator(mode="after")
    def _check_tier(self) -> Self:
        if self.tier != "device":
            raise KeyedError(
                f"tier: {self.tier} is not supported yet; use tier: device, "
                "and checkpoint: true to save memory",
                ("tier",),
            )
        return self


class PlacementConfig(_Section):
    """Home of each class of state; an absent class is placed automatically."""

    parameters: Split = Field(None, description="A tier, or a split like {host: 40%, nvme: 60%}.")
    gradients: Split = Field(None, description="A tier or a split, as for parameters.")
    optimizer: Split = Field(None, description="A tier or a split, as for parameters.")
    activations: ActivationConfig = Field(
        default_factory=ActivationConfig, description="Saved activations."
    )


class OptimizerConfig(_Section):
    """The optimizer and how its states are kept."""

    type: Literal["adamw", "adam"] = Field(
        "adamw", description="adamw decays weights directly; adam adds the decay to the gradient."
    )
    lr: float = Field(1e-3, ge=0, description="Learning rate.")
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field(
        (0.9, 0.999), description="Decay rates of the two moments, each in [0, 1)."
    )
    eps: float = Field(1e-8, ge=0, description="Added to the denominator.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay.")
    amsgrad: bool = Field(False, description="Use the largest second moment seen.")
    maximize: bool = Field(False, description="Ascend instead of descend.")
    master: Literal["auto", "split", "fp32", "none"] = Field(
        "auto",
        description="Master weights: split (bf16 weight + 16-bit remainder), fp32 (a full copy), "
        "none (fp32 weights are their own). auto: split for bf16, fp32 for fp16, none for fp32.",
    )
    states: Literal["fp32"] = Field("fp32", description="Format of the moments.")
    chunk: AutoChunk = Field(
        "auto",
        description="Elements per piece streamed in the update: a multiple of 1024, rounded up to "
        "one of 2048 where parameters have 16 bits (pieces are whole pages).",
    )

    @model_validator(mode="after")
    def _check_betas(self) -> Self:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise KeyedError(f"betas: {beta} is not in [0, 1)", ("betas",))
        return self


class LossScaleConfig(_Section):
    """Dynamic loss scaling, for precision: fp16."""

    initial: float = Field(65536.0, gt=0, description="First scale.")
    growth_interval: int = Field(2000, ge=1, description="Good steps before the scale grows.")
    growth_factor: float = Field(2.0, gt=1, description="Factor on growth.")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="Factor after an overflow.")
    min: float = Field(1.0, gt=0, description="Smallest scale; an overflow there is an error.")


class GroupsConfig(_Section):
    """How parameters are grouped for moving together."""

    blocks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        (), description="Class names of the repeated blocks. Empty: found automatically."
    )


class ZeroConfig(_Section):
    """Sharding over ranks."""

    stage: int = Field(
        3, ge=0, le=3, description="What is sharded: 0 nothing .. 3 parameters as well."
    )


class OffloadConfig(_Section):
    """Everything a run needs to know; every key is optional."""

    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="Where the model computes.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Format of parameters and gradients; fp16 scales the loss."
    )
    seed: int = Field(
        0, ge=0, lt=1 << 63, description="Seed of initialisation, data order and sampling."
    )
    budget: BudgetConfig = Field(
        default_factory=BudgetConfig, description="Most bytes per tier; auto where absent."
    )
    nvme: NvmeConfig = Field(default_factory=NvmeConfig, description="The nvme tier.")
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig, description="auto, or the home of each class of state."
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="The optimizer and its states."
    )
    clip_grad_norm: float | None = Field(
        None, gt=0, description="Largest gradient norm; absent: no clipping."
    )
    skip_nonfinite: AutoBool = Field(
        "auto", description="Skip steps with infinite or NaN gradients. auto: true for fp16."
    )
    loss_scale: LossScaleConfig | None = Field(
        None, description="Dynamic loss scaling; only with precision: fp16."
    )
    gradient_accumulation_steps: int = Field(
        1,
        ge=1,
        description="Backward passes whose gradients add up to one step.",
    )
    prefetch: AutoDepth = Field("auto", description="Groups fetched ahead; 0: none.")
    groups: GroupsConfig = Field(
        default_factory=GroupsConfig, description="Which parameters move together."
    )
    zero: ZeroConfig = Field(default_factory=ZeroConfig, description="What is sharded over ranks.")
    train: TrainConfig = Field(
        default_factory=TrainConfig, description="What `offload train` does; unused elsewhere."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_auto_placement(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("placement"), str):
            return value
        if value["placement"] != "auto":
            raise KeyedError(
                f"placement: {value['placement']!r} is not known; write auto, or the classes "
                "below it, for example placement: {parameters: nvme, optimizer: nvme}",
                ("placement",),
            )
        return {**value, "placement": {}}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        _check_master(self.precision, self.optimizer.master)
        if self.loss_scale is not None and self.precision != "fp16":
            raise KeyedError(
                f"loss_scale: contradicts precision: {self.precision}; "
                "remove loss_scale, or set precision: fp16",
                ("loss_scale",),
            )
        if self.skip_nonfinite is False and self.precision == "fp16":
            raise KeyedError(
                "skip_nonfinite: false contradicts precision: fp16, whose loss scaling needs to "
                "skip steps; set skip_nonfinite: auto, or precision: bf16",
                ("skip_nonfinite",),
            )
        return self

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any] | OffloadConfig, overrides: Sequence[str] = ()
    ) -> OffloadConfig:
        """The configuration of a YAML file, a mapping, or as it is; `overrides` are `key=value`.

        Raises ConfigError (PathError for an unreadable file); its message names file, line, key.
        """
        if isinstance(source, OffloadConfig):
            if not overrides:
                return source
            source = source.to_dict()
        return cls._validated(load_source(source, overrides))

    @classmethod
    def _validated(cls, source: ConfigSource) -> OffloadConfig:
        try:
            return cls.model_validate(source.value)
        except ValidationError as error:
            raise render(error, cls, source) from None

    @property
    def master(self) -> Literal["split", "fp32", "none"]:
        """`optimizer.master` with auto resolved."""
        chosen: Any = self.optimizer.master
        return _MASTER_OF[self.precision] if chosen == "auto" else chosen  # type: ignore[return-value]

    @property
    def chunk_numel(self) -> int:
        """`optimizer.chunk` with auto resolved, in whole pages of every class of state."""
        chunk = AUTO_CHUNK_NUMEL if self.optimizer.chunk == "auto" else self.optimizer.chunk
        return round_up(chunk, PAGE_NBYTES // (4 if self.precision == "fp32" else 2))

    @property
    def skips_nonfinite(self) -> bool:
        """`skip_nonfinite` with auto resolved."""
        return self.precision == "fp16" if self.skip_nonfinite == "auto" else self.skip_nonfinite

    @property
    def scaling(self) -> LossScaleConfig | None:
        """Loss scaling: the settings under fp16 (defaults filled in), None otherwise."""
        return (self.loss_scale or LossScaleConfig()) if self.precision == "fp16" else None

    def resolved(self) -> OffloadConfig:
        """The same configuration with every `auto` that needs no machine filled in."""
        optimizer = self.optimizer.model_copy(
            update={"master": self.master, "chunk": self.chunk_numel}
        )
        update = {
            "optimizer": optimizer,
            "skip_nonfinite": self.skips_nonfinite,
            "loss_scale": self.scaling,
        }
        return self.model_copy(update=update)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `load` reads back to an equal configuration."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_yaml(self) -> str:
        """YAML that `load` reads back to an equal configuration."""
        return dump_yaml(self.to_dict())


def _check_master(precision: str, master: str) -> None:
    allowed = _MASTERS_ALLOWED[precision]
    if master == "auto" or master in allowed:
        return
    others = [name for name, masters in _MASTERS_ALLOWED.items() if master in masters]
    raise KeyedError(
        f"optimizer.master: {master} contradicts precision: {precision}; set optimizer.master: "
        f"auto or {' or '.join(allowed)}, or precision: {' or '.join(others)}",
        ("optimizer", "master"),
        ("precision",),
    )
