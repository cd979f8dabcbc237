"""The `train:` section: the model, the text and the schedule of `offload train`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offload.config.fields import KeyedError, PathText, Section, about

MOST_LAYERS = 4096  # deeper is a mistake, and would take long to count
MOST_WIDTH = 1 << 24
MOST_SIZE = 1 << 26  # of any one dimension; the largest vocabularies have 2^18
MOST_EXPERTS = 1 << 16
MOST_PARAMS = 10**15
MOST_TOKENS = 1 << 32  # of a pass


_COSINE = {"train.schedule.type": "cosine"}


class ModelConfig(Section):
    """Size and shape of the built-in language model."""

    main = "shape"

    shape: Literal["llama", "gpt"] = Field(
        "llama",
        description="llama: RMSNorm, rotary positions, SwiGLU. "
        "gpt: LayerNorm, learned positions, GELU.",
    )
    layers: int = Field(
        6, ge=1, le=MOST_LAYERS, description="Number of transformer blocks.", examples=[12]
    )
    hidden: int = Field(
        384,
        ge=1,
        le=MOST_WIDTH,
        description="Width of the residual stream; a multiple of heads.",
        examples=[768],
        json_schema_extra=about(see=["train.model.heads"]),
    )
    heads: int = Field(6, ge=1, description="Attention heads.", examples=[6])
    kv_heads: int | None = Field(
        None,
        ge=1,
        description="Key/value heads; must divide heads.",
        examples=[2],
        json_schema_extra=about(
            absent="as many as heads", needs={"train.model.shape": "llama"},
            see=["train.model.heads"],
        ),
    )  # fmt: skip
    mlp: int | None = Field(
        None,
        ge=1,
        le=MOST_SIZE,
        description="Width of the MLP.",
        examples=[1024],
        json_schema_extra=about(
            absent="4 x hidden (gpt), 8/3 x hidden (llama)", see=["train.model.hidden"]
        ),
    )
    experts: int | None = Field(
        None,
        ge=2,
        le=MOST_EXPERTS,
        description="Experts in the place of each MLP, of which every token is computed by "
        "experts_per_token.",
        examples=[8],
        json_schema_extra=about(
            absent="one MLP, which computes every token",
            see=["train.model.experts_per_token", "train.model.expert_mlp"],
        ),
    )
    experts_per_token: int = Field(
        2,
        ge=1,
        description="Experts that a router chooses for a token. The weights of several add up to "
        "1, that of a single one is its probability.",
        examples=[4],
        json_schema_extra=about(needs={"train.model.experts": 8}),
    )
    expert_mlp: int | None = Field(
        None,
        ge=1,
        le=MOST_SIZE,
        description="Width of one expert.",
        examples=[512],
        json_schema_extra=about(absent="that of mlp", needs={"train.model.experts": 8}),
    )
    aux_loss: float = Field(
        0.01,
        ge=0,
        allow_inf_nan=False,
        description="Coefficient of the load-balancing loss in a training loss: the mean over "
        "blocks of E / k sum(P f), with E experts and k per token, f the share of tokens that "
        "chose an expert and P its mean probability; 1 where all are chosen alike.",
        examples=[0.001],
        json_schema_extra=about(needs={"train.model.experts": 8}),
    )
    vocab: int = Field(
        256,
        ge=256,
        le=MOST_SIZE,
        description="Vocabulary size; bytes are tokens 0..255.",
        examples=[32000],
        json_schema_extra=about(unit="tokens"),
    )
    max_sequence: int = Field(
        1024,
        ge=1,
        le=MOST_TOKENS,
        description="Longest sequence the model can read.",
        examples=[2048],
        json_schema_extra=about(unit="tokens", see=["train.sequence"]),
    )
    tied: bool = Field(True, description="Share the embedding with the output head.")
    rope_theta: float = Field(
        10000.0,
        gt=0,
        description="Base of the rotary frequencies.",
        examples=[500000.0],
        json_schema_extra=about(needs={"train.model.shape": "llama"}),
    )
    norm_eps: float = Field(
        1e-5, gt=0, description="Epsilon of the normalisation layers.", examples=[1e-6]
    )
    init_std: float = Field(
        0.02, gt=0, description="Standard deviation of the initial weights.", examples=[0.01]
    )

    @property
    def kv_head_count(self) -> int:
        """Key/value heads with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP with the default filled in."""
        if self.mlp is not None:
            return self.mlp
        return 4 * self.hidden if self.shape == "gpt" else -(-8 * self.hidden // (3 * 64)) * 64

    @property
    def expert_width(self) -> int:
        """Width of one expert with the default filled in."""
        return self.mlp_width if self.expert_mlp is None else self.expert_mlp

    @property
    def numel(self) -> int:
        """The number of parameters, without those of norms."""
        return self._numel(self.experts)

    @property
    def active_numel(self) -> int:
        """The number of parameters that compute one token."""
        return self._numel(None if self.experts is None else self.experts_per_token)

    def _numel(self, experts: int | None) -> int:
        """Return the number of parameters with `experts` experts per layer; None: a dense MLP."""
        products = 2 + 2 * self.kv_head_count / self.heads
        gated = 3 if self.shape == "llama" else 2
        width = self.mlp_width if experts is None else experts * self.expert_width
        router = (self.experts or 0) * self.hidden
        block = products * self.hidden**2 + gated * self.hidden * width + router
        positions = self.max_sequence if self.shape == "gpt" else 0
        tables = self.vocab * (1 if self.tied else 2) + positions
        return int(self.layers * block) + tables * self.hidden

    @model_validator(mode="after")
    def _check_numel(self) -> Self:
        if self.numel > MOST_PARAMS:
            experts = f", experts: {self.experts}" if self.experts else ""
            raise KeyedError(
                f"hidden: {self.hidden} makes {self.numel:.3g} parameters with layers: "
                f"{self.layers}{experts} and vocab: {self.vocab}; at most {MOST_PARAMS:.0e} are "
                "counted",
                ("hidden",),
                ("layers",),
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.experts is not None:
            if self.experts_per_token > self.experts:
                raise KeyedError(
                    f"experts_per_token: {self.experts_per_token} of experts: {self.experts}; a "
                    "token is computed by at most all of them",
                    ("experts_per_token",),
                    ("experts",),
                )
            return self
        for name in ("experts_per_token", "expert_mlp", "aux_loss"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise KeyedError(
                    f"{name}: {value} is for a mixture of experts; set experts, or remove {name}",
                    (name,),
                )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden % self.heads:
            raise KeyedError(
                f"hidden: {self.hidden} is not a multiple of heads: {self.heads}",
                ("hidden",),
                ("heads",),
            )
        if self.shape == "llama" and (self.hidden // self.heads) % 2:
            raise KeyedError(
                f"hidden: {self.hidden} / heads: {self.heads} is odd; "
                "rotary positions need an even head size",
                ("hidden",),
                ("heads",),
            )
        if self.heads % self.kv_head_count:
            raise KeyedError(
                f"heads: {self.heads} is not a multiple of kv_heads: {self.kv_heads}",
                ("kv_heads",),
                ("heads",),
            )
        if self.shape == "gpt" and self.kv_heads is not None and self.kv_heads != self.heads:
            raise KeyedError(
                f"kv_heads: {self.kv_heads} contradicts shape: gpt; "
                "remove kv_heads or use shape: llama",
                ("kv_heads",),
                ("shape",),
            )
        return self


class ScheduleConfig(Section):
    """The learning rate over the steps, as a factor on optimizer.lr."""

    main = "type"

    type: Literal["cosine", "constant"] = Field(
        "cosine", description="Shape of the learning rate after the warm-up."
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Linear warm-up from zero.",
        examples=[20],
        json_schema_extra=about(unit="steps"),
    )
    final: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Last learning rate as a share of optimizer.lr.",
        examples=[0.0],
        json_schema_extra=about(needs=_COSINE, see=["optimizer.lr"]),
    )


class SampleConfig(Section):
    """Text generated before and after training."""

    main = "length"

    prompt: str = Field(
        "ROMEO:", min_length=1, description="Text the sample continues.", examples=["HAMLET:"]
    )
    length: int = Field(
        160,
        ge=0,
        description="Bytes to generate; 0 prints no sample.",
        examples=[0],
        json_schema_extra=about(unit="bytes"),
    )
    temperature: float = Field(
        0.8,
        ge=0,
        description="0 takes the likeliest byte; higher is more random.",
        examples=[0.0],
    )


class TrainConfig(Section):
    """What `offload train` trains, on what, and for how long."""

    main = "steps"

    model: ModelConfig = Field(default_factory=ModelConfig, description="The built-in model.")
    text: PathText = Field(
        "shakespeare",
        description="shakespeare, python (the standard library's documentation and sources), "
        "or the path of a text file.",
        examples=["book.txt"],
    )
    validation: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of the text, at its end, kept for validation.",
        examples=[0.1],
    )
    steps: int = Field(200, ge=1, description="Optimizer steps.", examples=[1000])
    batch: int = Field(
        4,
        ge=1,
        description="Sequences per backward pass.",
        examples=[8],
        json_schema_extra=about(
            unit="sequences", see=["gradient_accumulation_steps", "micro_batches"]
        ),
    )
    sequence: int = Field(
        256,
        ge=1,
        description="Length of a sequence.",
        examples=[512],
        json_schema_extra=about(unit="bytes"),
    )
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig, description="Learning rate over the steps."
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        description="Steps between validation losses; 0: at the end only.",
        examples=[100],
        json_schema_extra=about(unit="steps"),
    )
    evaluate_batches: int = Field(
        4,
        ge=0,
        description="Batches per validation loss; 0 evaluates nothing.",
        examples=[8],
        json_schema_extra=about(unit="batches", see=["train.validation"]),
    )
    checkpoint_every: int = Field(
        0,
        ge=0,
        description="Steps between checkpoints, which are written beside the steps that follow; "
        "the last step is saved, too. 0: none, but for what a Ctrl-C or SIGTERM saves.",
        examples=[100],
        json_schema_extra=about(unit="steps", see=["train.keep_last", "train.keep_every"]),
    )
    keep_last: int = Field(
        2,
        ge=1,
        description="Checkpoints that stay: the last ones.",
        examples=[3],
        json_schema_extra=about(see=["train.checkpoint_every"]),
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        description="Of older checkpoints those of each so-manieth step stay, too.",
        examples=[1000],
        json_schema_extra=about(
            unit="steps", absent="none of them", see=["train.checkpoint_every"]
        ),
    )
    loggers: Annotated[tuple[Literal["csv", "tensorboard", "wandb"], ...], Field(strict=False)] = (
        Field(
            (),
            description="Where figures of each step go beside the run folder's metrics.jsonl: "
            "metrics.csv or tensorboard/ in that folder, or Weights & Biases.",
            examples=[["csv", "tensorboard"]],
        )
    )
    compare_plain: bool = Field(
        False,
        description="Train the same in plain PyTorch afterwards, in a process of its own, and show "
        "both (one rank, optimizer.type: adamw, fp32 or bf16).",
        json_schema_extra=about(see=["optimizer.type", "precision"]),
    )
    sample: SampleConfig = Field(
        default_factory=SampleConfig, description="The text to generate, to see what was learnt."
    )

    @model_validator(mode="after")
    def _check_sequence(self) -> Self:
        if self.batch * self.sequence > MOST_TOKENS:
            raise KeyedError(
                f"batch: {self.batch} x sequence: {self.sequence} are "
                f"{self.batch * self.sequence:,} tokens in a pass; at most {MOST_TOKENS:,}",
                ("batch",),
                ("sequence",),
            )
        if self.sequence > self.model.max_sequence:
            raise KeyedError(
                f"sequence: {self.sequence} is longer than model.max_sequence: "
                f"{self.model.max_sequence}; raise the latter",
                ("sequence",),
                ("model", "max_sequence"),
            )
        return self
