"""The configuration: frozen models, one per section, composed into `OffloadConfig`.

The models check what is independent of the machine; whether a path exists or a budget fits is
checked when the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from offload.config.errors import render
from offload.config.fields import (
    AutoBool,
    AutoDepth,
    AutoThreads,
    BackendName,
    Budget,
    DeviceName,
    FurtherTier,
    KeyedError,
    PathText,
    Percent,
    Recompute,
    Section,
    Split,
    TierText,
    WeightFormatName,
    key,
    section,
)
from offload.config.file import dump_yaml
from offload.config.optimizer import OptimizerConfig
from offload.config.paths import StrPath
from offload.config.source import load_source
from offload.config.suggestions import near
from offload.config.training import TrainConfig
from offload.errors import ConfigError
from offload.kernels.weight_formats import QuantType, WeightFormat
from offload.tiers.placement import Placement
from offload.tiers.tier import PAGE_NBYTES, TIERS, Tier
from offload.tiers.units import round_up
from offload.zero.groups.storage import Storage

AUTO_CHUNK_NUMEL = 1 << 20

_MASTERS_ALLOWED = {  # the first one is that of `auto`
    "fp32": ("none",),
    "bf16": ("split", "fp32", "none"),
    "fp16": ("fp32",),
}


class BudgetConfig(Section):
    """The maximum bytes that each tier may hold (these three, and any that was registered), and
    that are taken of a GPU in all."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[FurtherTier, Budget]

    device: Budget = key(None, example="16GiB", unit="bytes")
    """GPU memory for states, their copies and buffers; the tensors of a pass come on top. A
    percentage is of the free GPU memory, or of `gpu`. auto: what the plan can use, at most 80%.
    Without a GPU: the part of RAM that the model computes with."""
    host: Budget = key(None, example="6GiB", unit="bytes")
    """RAM for states, their copies and buffers, of each rank; activations come on top without a
    GPU. A percentage is of all RAM, or of the cgroup's limit. auto: the free RAM less a twentieth
    (at least 1 GiB), and less activations: 30% of it where the batch is not known."""
    nvme: Budget = key(None, example="100GiB", unit="bytes")
    """Swap files. A percentage is of the free space in nvme.paths. auto: 90%."""
    gpu: Budget = key(None, example="24GiB", unit="bytes", absent="what is free on it")
    """GPU memory of the process in all: the device tier, a pass's tensors, the CUDA context,
    workspaces, and tensors that are there before. The tier gets what the others leave, and no more
    than `device`; where the batch is not known beforehand (`offload train` and memest know it), at
    most 80% less the context, or `device`. A plan without room is refused, and PyTorch is held to
    it. A percentage is of the free GPU memory."""

    def of(self, tier: Tier) -> int | Percent | None:
        """Return the budget of a tier; None if it is open."""
        given: int | Percent | None = dict(self).get(tier.name)
        return given


class NvmeConfig(Section):
    """The folders of the nvme tier, and how they are read and written."""

    paths: Annotated[tuple[PathText, ...], Field(strict=False)] = key(
        (), example=["/mnt/nvme0/offload", "/mnt/nvme1/offload"]
    )
    """Folders for swap files, on one disk each; several are striped by their measured speed. {rank}
    and {local_rank} stand for the process's numbers under torchrun. Empty: the temporary folder, or
    /var/tmp where that one is in RAM."""
    backend: BackendName = key("auto")
    """How files are read and written: by threads, or by the system's libaio (extra `aio`). auto:
    threads, as fast as any with requests of some MiB."""
    threads: AutoThreads = key("auto", example=4, unit="threads per path")
    """I/O threads per path; with libaio, also requests in the kernel."""
    timeout_s: float = key(30.0, example=120.0, gt=0, le=1e6, unit="seconds")
    """The time in which a disk has to end one of its reads and writes, or another call (to make or
    to reserve a file); after it a StuckError names the call. A disk that is only slow ends one in
    time. Calls on checkpoints have no limit; a warning names them after 30 s."""


class ActivationConfig(Section):
    """The tier of saved activations, and whether they are kept or recomputed."""

    tier: TierText = key("device", example="nvme", per_rank=True)
    """The tier in which saved activations wait for backward. host: of use with a GPU only."""
    checkpoint: Recompute = key(False, example="selective")
    """Recompute each repeated block's activations in backward, with the same bits. selective: keep
    those of matrix products and attention. auto: the fastest that fits, where the batch is known
    beforehand (`offload train`, memest); otherwise false."""
    tiled_mlp: int | None = key(None, example=4096, ge=1, unit="tokens", absent="all at once")
    """Compute MLPs in tiles of so many tokens, and again in backward, so that what is between their
    matrices exists for one tile alone; `dispatch` does not. For modules named mlp, feed_forward or
    ffn that compute each token alone (no mixture of experts). Results differ by rounding, and not
    with placement."""

    @model_validator(mode="after")
    def _check_tiles(self) -> Self:
        if self.tiled_mlp is not None and self.checkpoint == "selective":
            raise self.contradiction(
                "tiled_mlp", "checkpoint",
                ", which keeps the products of tiles; set checkpoint: true, or remove tiled_mlp",
            )  # fmt: skip
        return self


class PlacementConfig(Section):
    """The home of each class of state; an absent class is placed automatically."""

    parameters: Split = key(None, example="host", per_rank=True)
    """Home of the parameters: a tier, or shares of several that sum to 100%."""
    gradients: Split = key(None, example="host", per_rank=True)
    """Home of the gradients between backward and update, as for parameters."""
    optimizer: Split = key(None, example={"host": "40%", "nvme": "60%"}, per_rank=True)
    """Home of the optimizer's states and of master weights, as for parameters. A GPU's share is
    that of the modules that forward needs first, whose gradients come last."""
    activations: ActivationConfig = section(ActivationConfig)
    """Home of the activations that forward saves for backward."""
    kv: Split = key(
        None,
        example="nvme",
        per_rank=True,
        absent="as transformers keeps them, outside of any budget",
    )
    """Home of the KV caches of a dispatched model, or of an engine's in calls without gradients
    (rollouts), page by page: a tier, or shares of several that sum to 100%."""

    def homes(self) -> dict[str, Placement | None]:
        """The home of each class of states by its key; None: chosen automatically."""
        names = ("parameters", "gradients", "optimizer")
        return {name: getattr(self, name) for name in names}


class StorageConfig(Section):
    """Frozen weights stored in fewer bits."""

    weights: WeightFormatName = key(..., example="nf4")
    """Format of frozen weights at home, on any tier: int8, int4 (asymmetric), or nf4 (as QLoRA).
    They are quantized once, while they are loaded, and dequantized into memory of the budget to
    compute with: the same values on every tier. Frozen matrices alone: norms, biases and trained
    parameters are not quantized."""
    group_size: Literal[32, 64, 128, 256] = key(64, example=128, unit="elements")
    """Consecutive elements that share a scale; the number divides the rows of a weight (for nf4 the
    whole weight). Smaller groups are more exact, and take more bytes."""
    skip: Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | None, Field(strict=False)] = (
        key(
            None, example=["lm_head", "embed_tokens", "layers.0"], absent="lm_head, if there is one"
        )
    )
    """Modules or parameters that are not quantized: names or the ends of names, with * and ?. A
    tied weight is not if one of its names is listed. Empty: none."""


class KVConfig(Section):
    """KV caches in tiers, where `placement.kv` names their home."""

    dtype: Literal["auto", "int8"] = key("auto")
    """How keys and values are stored. int8: a byte per element, with a scale and an offset per head
    and token: approximate, and the same in every tier. auto: as the model computes them."""
    tokens: int | None = key(
        None,
        example=32768,
        ge=1,
        le=1 << 40,
        unit="tokens",
        absent="what weights leave of the budgets",
    )
    """Tokens of all sequences together that the plan leaves room for. Caches may grow beyond it, as
    far as there is room."""


class LossScaleConfig(Section):
    """Dynamic loss scaling, for precision: fp16. The scale is halved after an overflow, whose step
    is skipped, and doubled after many steps without one."""

    initial: float = key(65536.0, example=1024.0, ge=2.0**-126, le=2.0**126)
    """The loss is multiplied with this at first, and gradients are divided by it."""
    growth_interval: int = key(2000, example=1000, ge=1, unit="steps")
    """Steps in a row without an overflow before the scale is doubled."""
    min: float | None = key(None, example=1.0, gt=0, absent="none, as of torch's GradScaler")
    """Smallest scale; after an overflow there it stays, and the step is skipped."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min is not None and self.initial < self.min:
            raise KeyedError(
                f"initial: {self.initial:g} is below min: {self.min:g}; raise initial, or lower "
                "min",
                "initial",
                "min",
            )
        return self


class GroupsConfig(Section):
    """How parameters are grouped for moving together."""

    blocks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = key(
        (), example=["LlamaDecoderLayer"]
    )
    """Class names of the modules whose parameters move together, as a model's repeated blocks.
    Empty: found automatically."""


class ZeroConfig(Section):
    """Sharding over ranks."""

    stage: int = key(3, example=2, ge=0, le=3)
    """The sharded states: 0 none, 1 optimizer states, 2 gradients as well, 3 parameters as well. No
    effect on one rank."""
    shard_group: int | None = key(None, example=8, ge=1, unit="ranks", absent="all ranks share one")
    """Neighbouring ranks that share one copy of the states; the others have copies of their own (as
    HSDP, hpZ, MiCS)."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = key("fp32")
    """Format to which gradients are rounded before they are summed over ranks. fp32: no rounding;
    sums are in fp32 in any case."""
    timeout_s: float = key(600.0, example=60.0, gt=0, le=1e6, per_rank=True, unit="seconds")
    """Longest wait for other ranks; then a RankError names those that are missing."""

    @model_validator(mode="after")
    def _check_shard_group(self) -> Self:
        if self.stage == 0 and self.shard_group is not None:
            raise self.contradiction(
                "shard_group", "stage",
                ", which shards nothing; remove shard_group, or set stage: 1 or more",
            )  # fmt: skip
        return self


class LossConfig(Section):
    """How a causal language model of transformers computes its loss."""

    chunked: bool = key(False, example=True)
    """Compute the loss in parts, so that logits, often a pass's largest tensor, are never whole,
    while the model trains and is given labels: there are no `outputs.logits` then. For models
    whose loss is plain cross-entropy of a linear head; others are a ConfigError."""


class WrittenFor(Section):
    """The model that `memest --write` wrote a configuration for."""

    model: str = key(..., example="Llama-3-8B")
    """Its name."""
    parameters: int = key(..., example=8_030_261_248, ge=1)
    """The number of its parameters, frozen ones included."""
    source: str | None = key(None, example="Llama-3-8B/config.json")
    """The place of its description: a file or folder, or module:function."""
    batch: int = key(1, example=1, ge=1, unit="sequences")
    """Sequences per pass that were planned with."""
    sequence: int = key(2048, example=2048, ge=1, unit="tokens")
    """Length of a sequence that was planned with."""

    def __str__(self) -> str:
        return f"{self.model} ({self.parameters:,} parameters)"

    def check(self, name: str, parameters: int) -> None:
        """Raise ConfigError unless the model `name` has as many parameters as this one."""
        if parameters != self.parameters:
            raise ConfigError(
                f"written_for: this file was written for {self}, and {name} has {parameters:,}; "
                "`memest MODEL --write FILE` writes one for it; if this one is meant for it all "
                "the same, remove written_for"
            )

    def refuse(self) -> None:
        """Raise ConfigError: `offload train` cannot build this model."""
        raise ConfigError(
            f"written_for: this file was written for {self}, and `offload train` and `offload "
            "plan` know only the built-in model; `memest FILE` plans this one, and "
            "offload.initialize(model, FILE) trains it in a loop of your own; for the built-in "
            "model, describe it under train.model and remove written_for"
        )


class OffloadConfig(Section):
    """Everything a run needs to know; every key is optional."""

    device: DeviceName = key("auto", example="cuda", per_rank=True)
    """The device that computes. auto: the GPU if PyTorch sees one. cuda is ROCm's name, too."""
    precision: Literal["fp32", "bf16", "fp16"] = key("fp32")
    """Format of parameters, gradients and computation. 16-bit formats keep master weights beside
    the parameters (optimizer.master); fp16 scales the loss, and its loop calls
    engine.backward(loss). Slow on CPUs without 16-bit products (`offload doctor`)."""
    seed: int = key(0, example=42, ge=0, lt=1 << 63)
    """Seed of the first values of a model on the meta device, of stochastic rounding, and of data
    order and samples in `offload train`."""
    budget: BudgetConfig = section(BudgetConfig, per_rank=True)
    """Most bytes that each tier may hold."""
    nvme: NvmeConfig = section(NvmeConfig, per_rank=True)
    """Swap files: where they are, and how they are read and written."""
    placement: PlacementConfig = section(PlacementConfig)
    """The home of each class of state. auto, or a class that is absent: the fastest placement
    within the budgets, by predicted time (memest shows it)."""
    kv: KVConfig = section(KVConfig, per_rank=True)
    """Keys and values of KV caches in tiers."""
    optimizer: OptimizerConfig = section(OptimizerConfig)
    """The optimizer and its states."""
    clip_grad_norm: float | None = key(None, example=1.0, gt=0, absent="no clipping")
    """Largest norm of all gradients together (2-norm): larger ones are scaled down to it."""
    skip_nonfinite: AutoBool = key("auto", example=True)
    """Skip steps with infinite or NaN gradients: nothing is updated, and
    engine.optimizer.step_was_skipped is true. auto: true for fp16."""
    max_skipped_steps: int = key(50, example=20, ge=1, le=1 << 40, unit="steps")
    """Skipped steps in a row that are an error, which names the parameters. The first steps of fp16
    may be skipped: the loss scale is halved until gradients fit."""
    loss_scale: LossScaleConfig | None = key(None, absent="its defaults, for fp16")
    """Dynamic loss scaling of precision: fp16."""
    gradient_accumulation_steps: int = key(1, example=4, ge=1, le=1 << 16, unit="passes")
    """Backward passes whose gradients add up to one step. The key describes the loop: it skips no
    step and divides no loss."""
    prefetch: AutoDepth = key("auto", example=4, per_rank=True, unit="groups")
    """Groups fetched ahead of their use; 0: none. auto: so many that some 48 MiB move."""
    groups: GroupsConfig = section(GroupsConfig, per_rank=True)
    """Which parameters move together."""
    storage: StorageConfig | None = key(None, absent="as the model computes with them")
    """Frozen weights in fewer bits (QLoRA, inference)."""
    loss: LossConfig = section(LossConfig)
    """The loss of models that transformers has."""
    zero: ZeroConfig = section(ZeroConfig)
    """Sharding of states over ranks."""
    train: TrainConfig = section(TrainConfig, per_rank=True)
    """Settings of `offload train`; a loop of your own ignores them."""
    written_for: WrittenFor | None = key(None, per_rank=True, absent="any model")
    """The model that this file was written for, which `memest --write` notes."""

    @model_validator(mode="before")
    @classmethod
    def _expand_auto_placement(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("placement"), str):
            return value
        if value["placement"] != "auto":
            tier = near(value["placement"], map(str, TIERS)) or Tier.NVME
            raise KeyedError(
                f"placement: {value['placement']!r} is not known; write auto, or the classes "
                f"below it, for example placement: {{parameters: {tier}, optimizer: {tier}}}",
                "placement",
            )
        return {**value, "placement": {}}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        _check_master(self.precision, self.optimizer.master)
        if self.optimizer.in_backward is True:
            self._check_in_backward()
        self._check_gradient_sums()
        if self.loss_scale is not None and self.precision != "fp16":
            raise KeyedError(
                f"loss_scale: contradicts precision: {self.precision}; "
                "remove loss_scale, or set precision: fp16",
                "loss_scale",
            )
        if self.skip_nonfinite is False and self.precision == "fp16":
            raise self.contradiction(
                "skip_nonfinite", "precision",
                ", whose loss scaling needs to skip steps; set skip_nonfinite: auto, or precision: "
                "bf16",
            )  # fmt: skip
        return self

    def _needs_all_gradients(self) -> tuple[str, str] | None:
        """Return text and key of the setting that needs every gradient before the first update."""
        if self.clip_grad_norm is not None:
            return f"clip_grad_norm: {self.clip_grad_norm:g}", "clip_grad_norm"
        if self.precision == "fp16":
            return "precision: fp16 (its loss scaling)", "precision"
        if self.skip_nonfinite is True:
            return "skip_nonfinite: true", "skip_nonfinite"
        return None

    @property
    def sums_gradients(self) -> bool:
        """Whether 16-bit gradients of several passes add up, which takes fp32."""
        return self.precision != "fp32" and self.gradient_accumulation_steps > 1

    def _check_gradient_sums(self) -> None:
        split = self.placement.gradients
        on_disk = split is not None and any(tier.is_file for tier in split.tiers)
        if on_disk and self.sums_gradients:
            raise KeyedError(
                "placement.gradients: nvme contradicts gradient_accumulation_steps: "
                f"{self.gradient_accumulation_steps} in {self.precision}: sums are kept in fp32, "
                "and twice the bytes on disk never pay; set placement.gradients: host, or a larger "
                "batch instead of accumulation, whose gradients move once in 16 bits",
                "placement.gradients",
                "gradient_accumulation_steps",
            )

    def _check_in_backward(self) -> None:
        other = self._needs_all_gradients()
        if other is not None:
            raise KeyedError(
                f"optimizer.in_backward: true contradicts {other[0]}, which needs all gradients "
                "before the first update; set in_backward: auto, or remove the other",
                "optimizer.in_backward",
                other[1],
            )

    def owning_the_loop(self) -> OffloadConfig:
        """Return the configuration for offload's own training loop, which takes every step it
        begins: `in_backward` is resolved."""
        if self.optimizer.in_backward != "auto":
            return self
        update = {"in_backward": self._needs_all_gradients() is None}
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update=update)})

    @classmethod
    def load(
        cls, source: StrPath | Mapping[str, Any] | OffloadConfig, overrides: Sequence[str] = ()
    ) -> OffloadConfig:
        """Load a YAML file, a mapping or an OffloadConfig; `overrides` are `key=value`.

        Raise ConfigError (PathError for an unreadable file); its message names file, line and key.
        """
        if isinstance(source, OffloadConfig):
            if not overrides:
                return source
            source = source.to_dict()
        loaded = load_source(source, overrides)
        try:
            return cls.model_validate(loaded.value)
        except ValidationError as error:
            raise render(error, cls, loaded) from None

    @property
    def master(self) -> Literal["split", "fp32", "none"]:
        """`optimizer.master` with auto resolved."""
        chosen: Any = self.optimizer.master
        return _MASTERS_ALLOWED[self.precision][0] if chosen == "auto" else chosen  # type: ignore[return-value]

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
        """The settings of loss scaling under fp16 (defaults filled in), None otherwise."""
        return (self.loss_scale or LossScaleConfig()) if self.precision == "fp16" else None

    @property
    def stored(self) -> Storage | None:
        """Which frozen weights are stored in fewer bits, and how; None if there are none."""
        chosen = self.storage
        if chosen is None:
            return None
        format_ = WeightFormat(QuantType[chosen.weights.upper()], chosen.group_size)
        return Storage(format_, chosen.skip)

    def splits_experts(self, ranks: int) -> bool:
        """Whether experts move one by one. At stage 3 they do not: ranks gather the same
        parameters, regardless of the experts that each rank chose."""
        return ranks == 1 or self.zero.stage < 3

    def resolved(self) -> OffloadConfig:
        """Return a copy with every `auto` resolved that depends on neither machine nor batch."""
        optimizer = self.optimizer.model_copy(
            update={
                "master": self.master,
                "chunk": self.chunk_numel,
                "in_backward": self.optimizer.in_backward is True,
            }
        )
        update = {
            "optimizer": optimizer,
            "skip_nonfinite": self.skips_nonfinite,
            "loss_scale": self.scaling,
        }
        return self.model_copy(update=update)

    def in_precision_of(self, weights: str | None) -> OffloadConfig:
        """Return a copy in the precision of the weights, if it is known and no precision is set."""
        if weights is None or "precision" in self.model_fields_set:
            return self
        return self.model_copy(update={"precision": weights})

    def for_inference(self) -> OffloadConfig:
        """Return a copy without the settings that only training uses, and settled: only parameters
        have a home, and ranks share nothing."""
        host = Placement.on(Tier.HOST)
        none = {"gradients": host, "optimizer": host, "activations": ActivationConfig()}
        update: dict[str, Any] = {
            "placement": self.placement.model_copy(update=none),
            "optimizer": OptimizerConfig(),
            "clip_grad_norm": None,
            "skip_nonfinite": "auto",
            "loss_scale": None,
            "gradient_accumulation_steps": 1,
            "zero": self.zero.model_copy(update={"stage": 0, "shard_group": None}),
        }
        return self.model_copy(update=update).settled()

    def settled(self) -> OffloadConfig:
        """Return a copy without `auto` for what depends on the batch: nothing is recomputed. It is
        for callers that do not know the batch; the others call `offload.planning.choice.solver`
        first."""
        activations = self.placement.activations
        if activations.checkpoint != "auto":
            return self
        activations = activations.model_copy(update={"checkpoint": False})
        placement = self.placement.model_copy(update={"activations": activations})
        return self.model_copy(update={"placement": placement})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `load` reads back to an equal configuration."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_yaml(self) -> str:
        """Return YAML that `load` reads back to an equal configuration."""
        return dump_yaml(self.to_dict())


def _check_master(precision: str, master: str) -> None:
    allowed = _MASTERS_ALLOWED[precision]
    if master == "auto" or master in allowed:
        return
    others = [name for name, masters in _MASTERS_ALLOWED.items() if master in masters]
    raise KeyedError(
        f"optimizer.master: {master} contradicts precision: {precision}; set optimizer.master: "
        f"auto or {' or '.join(allowed)}, or precision: {' or '.join(others)}",
        "optimizer.master",
        "precision",
    )
