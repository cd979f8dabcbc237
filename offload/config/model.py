"""The configuration: frozen models, one per section, composed into `OffloadConfig`.

The models check what is independent of the machine; whether a path exists or a budget fits is
checked when the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from offload.config.errors import render
from offload.config.fields import (
    AUTO_MICRO_BATCHES,
    SPLIT_SCHEMA,
    AutoBool,
    AutoDepth,
    AutoThreads,
    Budget,
    DeviceName,
    KeyedError,
    MicroBatches,
    PathText,
    Recompute,
    Section,
    Split,
    TierText,
    about,
    is_split,
    parse_split,
)
from offload.config.file import dump_yaml
from offload.config.optimizer import OptimizerConfig
from offload.config.paths import StrPath
from offload.config.remedies import near
from offload.config.source import ConfigSource, load_source
from offload.config.training import TrainConfig
from offload.config.written_for import WrittenFor
from offload.kernels.weight_formats import Code, WeightFormat
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.tiers.units import round_up
from offload.zero.gradients.loss_scale import has_inverse
from offload.zero.groups.storage import Storage

AUTO_CHUNK_NUMEL = 1 << 20

_MASTER_OF = {"fp32": "none", "bf16": "split", "fp16": "fp32"}
_MASTERS_ALLOWED = {
    "fp32": ("none",),
    "bf16": ("split", "fp32", "none"),
    "fp16": ("fp32",),
}


class BudgetConfig(Section):
    """The maximum bytes that each tier may hold."""

    main = "host"

    device: Budget = Field(
        None,
        description="Memory of the GPU for states, their copies and buffers; what a pass computes "
        "with comes on top. A percentage is of what is free there. auto: what the plan can use, at "
        "most 80%. Without a GPU: the part of RAM that the model computes with.",
        examples=["16GiB"],
        json_schema_extra=about(see=["device", "placement"]),
    )
    host: Budget = Field(
        None,
        description="RAM for states, their copies and buffers, of each rank; activations come on "
        "top without a GPU. A percentage is of all RAM, or of the cgroup's limit. auto: what is "
        "free less a twentieth (at least 1 GiB), and less what activations take: 30% of it where "
        "the batch is not known.",
        examples=["6GiB"],
        json_schema_extra=about(see=["placement", "prefetch"]),
    )
    nvme: Budget = Field(
        None,
        description="Swap files. A percentage is of the free space in nvme.paths. auto: 90%.",
        examples=["100GiB"],
        json_schema_extra=about(see=["nvme.paths", "placement"]),
    )


class NvmeConfig(Section):
    """The folders of the nvme tier, and how they are read and written."""

    main = "paths"

    paths: Annotated[tuple[PathText, ...], Field(strict=False)] = Field(
        (),
        description="Folders for swap files, on one disk each; several are striped by their "
        "measured speed. {rank} and {local_rank} stand for the process's numbers under torchrun. "
        "Empty: the temporary folder, or /var/tmp where that one is in RAM.",
        examples=[["/mnt/nvme0/offload", "/mnt/nvme1/offload"]],
        json_schema_extra=about(see=["budget.nvme"]),
    )
    backend: Literal["auto", "threads", "libaio"] = Field(
        "auto",
        description="How files are read and written: by threads, or by the system's libaio (extra "
        "`aio`). auto: threads, as fast as any with requests of some MiB.",
    )
    threads: AutoThreads = Field(
        "auto",
        description="I/O threads per path, of backend: threads.",
        examples=[4],
        json_schema_extra=about(unit="threads per path", see=["nvme.backend"]),
    )
    checksum: bool = Field(
        True, description="Compare an XXH3 sum of every block that is read with the written one."
    )
    direct: AutoBool = Field(
        "auto",
        description="O_DIRECT, which keeps swapped bytes out of the page cache. true: required; "
        "false: never; auto: where the file system has it.",
        examples=[True],
    )
    timeout_s: float = Field(
        30.0,
        gt=0,
        le=1e6,
        description="How long a folder's disk may be asked to read and write without ending any of "
        "it, or for anything else (to make or to reserve a file); then a StuckError names what is "
        "stuck. A disk that is only slow ends something. Of a checkpoint's folder, how long one "
        "call may take.",
        examples=[120.0],
        json_schema_extra=about(unit="seconds"),
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


class ActivationConfig(Section):
    """The tier of saved activations, and whether they are kept or recomputed."""

    main = "tier"

    tier: TierText = Field(
        "device",
        description="Where what forward saves waits for backward. host: of use with a GPU only.",
        examples=["nvme"],
        json_schema_extra=about(per_rank=True, see=["placement.activations.checkpoint"]),
    )
    checkpoint: Recompute = Field(
        False,
        description="Recompute each repeated block's activations in backward, with the same bits. "
        "selective: keep those of matrix products and attention. auto: as a step is fastest and "
        "fits, where the batch is known beforehand (`offload train`, memest); otherwise false.",
        examples=["selective"],
        json_schema_extra=about(see=["micro_batches"]),
    )


class _OrSplit:
    """The JSON Schema of `ExpertPlacement._of_all_classes`."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        tier, shares, _ = SPLIT_SCHEMA["anyOf"]
        return {"anyOf": [tier, shares, *handler(core_schema)["anyOf"]]}


class ExpertPlacement(Section):
    """The home of the states of experts; an absent class is placed automatically."""

    parameters: Split = Field(
        None,
        description="Home of the parameters of experts: a tier, or shares of each table's experts.",
        examples=["nvme"],
    )
    gradients: Split = Field(
        None,
        description="Home of the gradients of experts between backward and update.",
        examples=["host"],
    )
    optimizer: Split = Field(
        None,
        description="Home of the optimizer's states and of master weights of experts.",
        examples=[{"host": "25%", "nvme": "75%"}],
    )

    @model_validator(mode="before")
    @classmethod
    def _of_all_classes(cls, value: Any) -> Any:
        """Apply a tier, shares or auto to every class."""
        by_class = isinstance(value, Mapping) and (
            not is_split(value) or not value.keys().isdisjoint(cls.model_fields)
        )
        if by_class or isinstance(value, cls):
            return value
        return dict.fromkeys(cls.model_fields, parse_split(value))


class PlacementConfig(Section):
    """The home of each class of state; an absent class is placed automatically."""

    main = "parameters"

    parameters: Split = Field(
        None,
        description="Home of the parameters: a tier, or shares of several that sum to 100%.",
        examples=["host"],
        json_schema_extra=about(per_rank=True),
    )
    gradients: Split = Field(
        None,
        description="Home of the gradients between backward and update, as for parameters.",
        examples=["host"],
        json_schema_extra=about(
            per_rank=True, see=["gradient_accumulation_steps", "optimizer.in_backward"]
        ),
    )
    optimizer: Split = Field(
        None,
        description="Home of the optimizer's states and of master weights, as for parameters.",
        examples=[{"host": "40%", "nvme": "60%"}],
        json_schema_extra=about(per_rank=True, see=["optimizer.states", "optimizer.chunk"]),
    )
    experts: Annotated[ExpertPlacement | None, _OrSplit] = Field(
        None,
        description="Home of the states of experts that move one by one; the keys beside it then "
        "speak of all else. A tier or shares of several for every class, or keys by class. Shares "
        "are the same of each table of experts, so that no layer has more in slow tiers than "
        "others; experts of lower number are in the faster ones. auto: chosen apart from the rest. "
        "Absent: they are where the rest is.",
        json_schema_extra=about(
            per_rank=True, absent="where the rest is", see=["micro_batches", "zero.stage"]
        ),
    )
    activations: ActivationConfig = Field(
        default_factory=ActivationConfig, description="What forward saves for backward."
    )
    kv: Split = Field(
        None,
        description="Home of the KV caches of a dispatched model, page by page: a tier, or shares "
        "of several that sum to 100%.",
        examples=["nvme"],
        json_schema_extra=about(
            per_rank=True,
            absent="as transformers keeps them, outside of any budget",
            see=["kv.dtype"],
        ),
    )

    def homes(self) -> dict[str, Placement | None]:
        """The home of each class of states by its key (`optimizer`, and `experts.optimizer` if
        experts have homes of their own); None: chosen automatically."""
        apart = () if self.experts is None else ExpertPlacement.model_fields
        return {
            **{name: getattr(self, name) for name in ExpertPlacement.model_fields},
            **{f"experts.{name}": getattr(self.experts, name) for name in apart},
        }

    def with_homes(self, homes: Mapping[str, Placement]) -> PlacementConfig:
        """Return a copy with these homes of classes, under the keys that `homes` uses."""
        rest = {name: home for name, home in homes.items() if "." not in name}
        apart = {name.partition(".")[2]: home for name, home in homes.items() if name not in rest}
        experts = self.experts
        if apart:
            experts = (experts or ExpertPlacement()).model_copy(update=apart)
        return self.model_copy(update={**rest, "experts": experts})


class StorageConfig(Section):
    """Frozen weights stored in fewer bits."""

    main = "weights"

    weights: Literal["int8", "int4", "nf4"] = Field(
        description="Format of frozen weights at home, on any tier: int8, int4 (asymmetric), or "
        "nf4 (as QLoRA). They are encoded once, while they are loaded, and decoded into memory of "
        "the budget to be computed with: the same values on every tier. Frozen matrices alone: "
        "norms, biases and what is trained stay as they are.",
        examples=["nf4"],
        json_schema_extra=about(see=["precision", "placement.parameters", "storage.skip"]),
    )
    group_size: Literal[32, 64, 128, 256] = Field(
        64,
        description="Consecutive elements that share a scale; they divide the rows of a weight "
        "(of nf4 the whole of it). Fewer are more exact, and take more bytes.",
        examples=[128],
        json_schema_extra=about(unit="elements", see=["storage.weights"]),
    )
    skip: Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | None, Field(strict=False)] = (
        Field(
            None,
            description="Modules or parameters that stay as they are: names or the ends of names, "
            "with * and ?. A tied weight stays if one of its names does. Empty: none.",
            examples=[["lm_head", "embed_tokens", "layers.0"]],
            json_schema_extra=about(absent="lm_head, if there is one"),
        )
    )


class KVConfig(Section):
    """KV caches of a dispatched model, where `placement.kv` names their home."""

    main = "dtype"

    dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="How keys and values are stored. int8: a byte per element, with a scale and an "
        "offset per head and token: approximate, and the same in every tier. auto: as the model "
        "computes them.",
        json_schema_extra=about(see=["placement.kv"]),
    )
    tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Tokens of all sequences together that the plan leaves room for. Caches may "
        "grow beyond it, as far as there is room.",
        examples=[32768],
        json_schema_extra=about(
            unit="tokens", absent="what weights leave of the budgets", see=["placement.kv"]
        ),
    )


class LossScaleConfig(Section):
    """Dynamic loss scaling, for precision: fp16."""

    main = "initial"

    initial: float = Field(
        65536.0,
        gt=0,
        description="The loss is multiplied with this at first, and gradients are divided by it.",
        examples=[1024.0],
        json_schema_extra=about(see=["loss_scale.min"]),
    )
    growth_interval: int = Field(
        2000,
        ge=1,
        description="Steps in a row without an overflow before the scale grows.",
        examples=[1000],
        json_schema_extra=about(unit="steps"),
    )
    growth_factor: float = Field(
        2.0,
        gt=1,
        description="The scale grows by this factor.",
        examples=[2.0],
    )
    backoff_factor: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="The scale shrinks by this factor after an overflow, whose step is skipped.",
        examples=[0.5],
    )
    min: float | None = Field(
        None,
        gt=0,
        description="Smallest scale; after an overflow there it stays, and the step is skipped.",
        examples=[1.0],
        json_schema_extra=about(absent="none, as of torch's GradScaler", see=["max_skipped_steps"]),
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if not has_inverse(self.initial):
            raise KeyedError(
                f"initial: {self.initial:g} cannot be used in fp32; the loss is multiplied with "
                "it, and gradients with its inverse: it has to be between 2^-127 and 2^127",
                ("initial",),
            )
        if self.min is not None and self.initial < self.min:
            raise KeyedError(
                f"initial: {self.initial:g} is below min: {self.min:g}; raise initial, or lower "
                "min",
                ("initial",),
                ("min",),
            )
        return self


class ThreadsConfig(Section):
    """How the cores are shared out. I/O threads are under `nvme`."""

    main = "optimizer"

    optimizer: AutoThreads = Field(
        "auto",
        description="Threads of the CPU optimizer. auto: all cores where the model computes on the "
        "CPU, too (it waits meanwhile, or both share); beside a GPU all but two.",
        examples=[8],
    )
    torch: AutoThreads = Field(
        "auto",
        description="PyTorch's threads on the CPU. auto: as PyTorch has them.",
        examples=[8],
    )


class GroupsConfig(Section):
    """How parameters are grouped for moving together."""

    main = "blocks"

    blocks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        (),
        description="Class names of the modules whose parameters move together, as a model's "
        "repeated blocks. Empty: found automatically.",
        examples=[["LlamaDecoderLayer"]],
        json_schema_extra=about(see=["micro_batches", "placement.activations.checkpoint"]),
    )


class ZeroConfig(Section):
    """Sharding over ranks."""

    main = "stage"

    stage: int = Field(
        3,
        ge=0,
        le=3,
        description="What is sharded: 0 nothing, 1 optimizer states, 2 gradients as well, 3 "
        "parameters as well. Of no effect on one rank.",
        examples=[2],
    )
    shard_group: int | None = Field(
        None,
        ge=1,
        description="Neighbouring ranks that share one copy of the states; the others have copies "
        "of their own (as HSDP, hpZ, MiCS).",
        examples=[8],
        json_schema_extra=about(unit="ranks", absent="all ranks share one", see=["zero.stage"]),
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Format that gradients are rounded to before they are summed over ranks. "
        "fp32: none is; sums are in fp32 in any case.",
    )
    quantized_weights: bool = Field(
        False,
        description="Gather parameters in 8 bits per element (as ZeRO++): half the bytes of bf16, "
        "and approximate.",
        json_schema_extra=about(needs={"zero.stage": 3}, see=["zero.shard_group"]),
    )
    quantized_gradients: bool = Field(
        False,
        description="Send gradients to be summed in 8 bits per element (as ZeRO++): approximate.",
        json_schema_extra=about(see=["zero.stage", "zero.shard_group"]),
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        le=1e6,
        description="Longest wait for other ranks; then a RankError names those that are missing.",
        examples=[60.0],
        json_schema_extra=about(per_rank=True, unit="seconds"),
    )

    @model_validator(mode="after")
    def _check_quantized(self) -> Self:
        if self.quantized_weights and self.stage < 3:
            raise KeyedError(
                f"quantized_weights: true contradicts stage: {self.stage}, where every rank keeps "
                "all parameters exactly; remove quantized_weights, or set stage: 3",
                ("quantized_weights",),
                ("stage",),
            )
        if self.stage == 0 and self.shard_group is not None:
            raise KeyedError(
                f"shard_group: {self.shard_group} contradicts stage: 0, which shards nothing; "
                "remove shard_group, or set stage: 1 or more",
                ("shard_group",),
                ("stage",),
            )
        if self.quantized_gradients and (self.stage == 0 or self.shard_group == 1):
            other = "stage: 0" if self.stage == 0 else "shard_group: 1"
            raise KeyedError(
                f"quantized_gradients: true contradicts {other}: only gradients that are sharded "
                "are sent in 8 bits; remove quantized_gradients, or shard over several ranks",
                ("quantized_gradients",),
                ("stage",) if self.stage == 0 else ("shard_group",),
            )
        if self.quantized_weights and self.shard_group == 1:
            raise KeyedError(
                "quantized_weights: true contradicts shard_group: 1, where every rank keeps all "
                "parameters exactly; remove quantized_weights, or shard over several ranks",
                ("quantized_weights",),
                ("shard_group",),
            )
        return self


def _or_auto(schema: dict[str, Any]) -> None:
    """The JSON Schema of `_expand_auto_placement`."""
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"const": "auto"}]


class OffloadConfig(Section):
    """Everything a run needs to know; every key is optional."""

    device: DeviceName = Field(
        "auto",
        description="Where the model computes. auto: on the GPU if PyTorch sees one. cuda is "
        "ROCm's name, too.",
        examples=["cuda"],
        json_schema_extra=about(per_rank=True),
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Format that parameters and gradients have and the model computes in. 16 bits "
        "keep master weights beside it (optimizer.master); fp16 scales the loss, and its loop "
        "calls engine.backward(loss). Slow on CPUs without 16-bit products (`offload doctor`).",
        json_schema_extra=about(see=["optimizer.master"]),
    )
    seed: int = Field(
        0,
        ge=0,
        lt=1 << 63,
        description="Seed of the first values of a model on the meta device, of stochastic "
        "rounding, and of data order and samples in `offload train`.",
        examples=[42],
    )
    budget: BudgetConfig = Field(
        default_factory=BudgetConfig,
        description="Most bytes that each tier may hold.",
        json_schema_extra=about(per_rank=True),
    )
    nvme: NvmeConfig = Field(
        default_factory=NvmeConfig,
        description="Swap files: where they are, and how they are read and written.",
        json_schema_extra=about(per_rank=True),
    )
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig,
        description="The home of each class of state. auto, or a class that is absent: the fastest "
        "placement within the budgets, by predicted time (`offload plan` shows it).",
        json_schema_extra=_or_auto,
    )
    kv: KVConfig = Field(
        default_factory=KVConfig,
        description="Keys and values of a dispatched model.",
        json_schema_extra=about(per_rank=True),
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="The optimizer and its states."
    )
    clip_grad_norm: float | None = Field(
        None,
        gt=0,
        description="Largest norm of all gradients together (2-norm): larger ones are scaled down "
        "to it.",
        examples=[1.0],
        json_schema_extra=about(absent="no clipping", see=["optimizer.in_backward"]),
    )
    skip_nonfinite: AutoBool = Field(
        "auto",
        description="Skip steps with infinite or NaN gradients: nothing is updated, and "
        "engine.optimizer.step_was_skipped is true. auto: true for fp16.",
        examples=[True],
        json_schema_extra=about(see=["precision", "optimizer.in_backward", "max_skipped_steps"]),
    )
    max_skipped_steps: int = Field(
        50,
        ge=1,
        le=1 << 40,
        description="So many steps skipped in a row are an error, which names the parameters. The "
        "first steps of fp16 may be: the loss scale is halved until gradients fit.",
        examples=[20],
        json_schema_extra=about(unit="steps", see=["skip_nonfinite", "loss_scale.min"]),
    )
    loss_scale: LossScaleConfig | None = Field(
        None,
        description="Dynamic loss scaling of precision: fp16.",
        json_schema_extra=about(absent="its defaults, for fp16", needs={"precision": "fp16"}),
    )
    gradient_accumulation_steps: int = Field(
        1,
        ge=1,
        le=1 << 16,
        description="Backward passes whose gradients add up to one step. Says what the loop does: "
        "no step is skipped, and no loss is divided.",
        examples=[4],
        json_schema_extra=about(unit="passes", see=["micro_batches", "precision"]),
    )
    micro_batches: MicroBatches = Field(
        1,
        description="Pieces of each batch that a block runs over before the next block begins: "
        "weights and gradients move once per step, and a block that is recomputed is so piece by "
        "piece. auto: as many as make a step fastest and fit, where the batch is known beforehand "
        "(`offload train`, memest); otherwise 1. Another number rounds differently.",
        examples=[4],
        json_schema_extra=about(unit="pieces"),
    )
    prefetch: AutoDepth = Field(
        "auto",
        description="Groups fetched ahead of their use; 0: none. auto: from measured speed.",
        examples=[4],
        json_schema_extra=about(per_rank=True, see=["budget.device"]),
    )
    threads: ThreadsConfig = Field(
        default_factory=ThreadsConfig,
        description="How the cores are shared out.",
        json_schema_extra=about(per_rank=True),
    )
    groups: GroupsConfig = Field(
        default_factory=GroupsConfig,
        description="Which parameters move together.",
        json_schema_extra=about(per_rank=True),
    )
    storage: StorageConfig | None = Field(
        None,
        description="Frozen weights in fewer bits (QLoRA, inference).",
        json_schema_extra=about(absent="as the model computes with them"),
    )
    zero: ZeroConfig = Field(default_factory=ZeroConfig, description="What is sharded over ranks.")
    train: TrainConfig = Field(
        default_factory=TrainConfig,
        description="What `offload train` does; a loop of your own ignores it.",
        json_schema_extra=about(per_rank=True),
    )
    written_for: WrittenFor | None = Field(
        None,
        description="The model that this file was written for, which `memest --write` notes.",
        json_schema_extra=about(per_rank=True, absent="any model"),
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_auto_placement(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("placement"), str):
            return value
        if value["placement"] != "auto":
            tier = near(value["placement"], [each.value for each in Tier]) or Tier.NVME
            raise KeyedError(
                f"placement: {value['placement']!r} is not known; write auto, or the classes "
                f"below it, for example placement: {{parameters: {tier}, optimizer: {tier}}}",
                ("placement",),
            )
        return {**value, "placement": {}}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        _check_master(self.precision, self.optimizer.master)
        if self.optimizer.in_backward is True:
            self._check_in_backward()
        self._check_gradient_sums()
        self._check_experts()
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

    def _needs_all_gradients(self) -> tuple[str, tuple[str, ...]] | None:
        """Return text and key of the setting that needs every gradient before the first update."""
        if self.clip_grad_norm is not None:
            return f"clip_grad_norm: {self.clip_grad_norm:g}", ("clip_grad_norm",)
        if self.precision == "fp16":
            return "precision: fp16 (its loss scaling)", ("precision",)
        if self.skip_nonfinite is True:
            return "skip_nonfinite: true", ("skip_nonfinite",)
        return None

    @property
    def sums_gradients(self) -> bool:
        """Whether 16-bit gradients of several passes add up, which takes fp32."""
        return self.precision != "fp32" and self.gradient_accumulation_steps > 1

    def _check_gradient_sums(self) -> None:
        for name, split in self.placement.homes().items():
            on_disk = split is not None and any(tier.is_file for tier in split.tiers)
            if not (name.endswith("gradients") and on_disk and self.sums_gradients):
                continue
            raise KeyedError(
                f"placement.{name}: nvme contradicts gradient_accumulation_steps: "
                f"{self.gradient_accumulation_steps} in {self.precision}: sums are kept in fp32, "
                f"and twice the bytes on disk never pay; set placement.{name}: host, or "
                "micro_batches instead of accumulation, whose gradients move once in 16 bits",
                ("placement", *name.split(".")),
                ("gradient_accumulation_steps",),
            )

    def _check_experts(self) -> None:
        if self.placement.experts is not None and not self.splits_experts(1):
            raise KeyedError(
                f"placement.experts contradicts micro_batches: {self.micro_batches}, under which "
                "a block computes all pieces with all of its experts, which stay with it; remove "
                "one of the two",
                ("placement", "experts"),
                ("micro_batches",),
            )

    def _check_in_backward(self) -> None:
        other = self._needs_all_gradients()
        if other is not None:
            raise KeyedError(
                f"optimizer.in_backward: true contradicts {other[0]}, which needs all gradients "
                "before the first update; set in_backward: auto, or remove the other",
                ("optimizer", "in_backward"),
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
        """The settings of loss scaling under fp16 (defaults filled in), None otherwise."""
        return (self.loss_scale or LossScaleConfig()) if self.precision == "fp16" else None

    @property
    def stored(self) -> Storage | None:
        """Which frozen weights are stored in fewer bits, and how; None if there are none."""
        chosen = self.storage
        if chosen is None:
            return None
        format_ = WeightFormat(Code[chosen.weights.upper()], chosen.group_size)
        return Storage(format_, chosen.skip)

    def splits_experts(self, ranks: int) -> bool:
        """Whether experts move one by one. With `micro_batches` a block computes all pieces while
        all of its parameters are present; at stage 3 ranks gather the same parameters, regardless
        of the experts that each rank chose."""
        gathers = ranks > 1 and self.zero.stage >= 3
        return self.micro_batches in (1, AUTO_MICRO_BATCHES) and not gathers

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
        experts = self.placement.experts
        if experts is not None:
            experts = experts.model_copy(update={"gradients": host, "optimizer": host})
        none = {"gradients": host, "optimizer": host, "experts": experts}
        update: dict[str, Any] = {
            "placement": self.placement.model_copy(
                update={**none, "activations": ActivationConfig()}
            ),
            "optimizer": OptimizerConfig(),
            "clip_grad_norm": None,
            "skip_nonfinite": "auto",
            "loss_scale": None,
            "gradient_accumulation_steps": 1,
            "zero": self.zero.model_copy(
                update={"stage": 0, "shard_group": None, "quantized_weights": False}
            ),
        }
        return self.model_copy(update=update).settled()

    def settled(self) -> OffloadConfig:
        """Return a copy without `auto` for what depends on the batch: nothing recomputed, one
        piece. It is for callers that do not know the batch; the others call
        `offload.planning.choice.solver` first."""
        activations = self.placement.activations
        config = self
        if activations.checkpoint == "auto":
            activations = activations.model_copy(update={"checkpoint": False})
            placement = self.placement.model_copy(update={"activations": activations})
            config = config.model_copy(update={"placement": placement})
        if self.micro_batches == AUTO_MICRO_BATCHES:
            config = config.model_copy(update={"micro_batches": 1})
        return config

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
        ("optimizer", "master"),
        ("precision",),
    )
