"""The `train:` section: the model, the text and the schedule of `offload train`."""

import math
from typing import Literal, Self

from pydantic import model_validator

from offload.config.fields import KeyedError, PathText, Section, key, section

MAX_LAYERS = 4096  # deeper is a mistake, and would take long to count
MAX_WIDTH = 1 << 20
MAX_SIZE = 1 << 26  # of any one dimension; the largest vocabularies have 2^18
MAX_EXPERTS = 1 << 16
MAX_BATCH = 1 << 20
MAX_PARAMS = 10**15  # that are counted
MAX_TOKENS = 1 << 32  # of a pass


class ModelConfig(Section):
    """Sizes of the built-in language model, as Llama: RMSNorm, rotary positions, SwiGLU."""

    layers: int = key(6, example=12, ge=1, le=MAX_LAYERS)
    """Number of transformer blocks."""
    hidden: int = key(384, example=768, ge=1, le=MAX_WIDTH)
    """Width of the residual stream; a multiple of heads."""
    heads: int = key(6, example=6, ge=1)
    """Attention heads."""
    kv_heads: int | None = key(None, example=2, ge=1, absent="as many as heads")
    """Key/value heads; must divide heads."""
    mlp: int | None = key(None, example=1024, ge=1, le=MAX_SIZE, absent="8/3 x hidden")
    """Width of the MLP."""
    experts: int | None = key(
        None, example=8, ge=2, le=MAX_EXPERTS, absent="one MLP, which computes every token"
    )
    """Experts in the place of each MLP, of which every token is computed by experts_per_token."""
    experts_per_token: int = key(2, example=4, ge=1)
    """Experts that a router chooses for a token. The weights of several add up to 1, that of a
    single one is its probability."""
    expert_mlp: int | None = key(None, example=512, ge=1, le=MAX_SIZE, absent="that of mlp")
    """Width of one expert."""
    aux_loss: float = key(0.01, example=0.001, ge=0, allow_inf_nan=False)
    """Coefficient of the load-balancing loss in a training loss: the mean over blocks of E / k
    sum(P f), with E experts and k per token, f the share of tokens that chose an expert and P its
    mean probability; 1 where all are chosen alike."""
    vocab: int = key(256, example=32000, ge=256, le=MAX_SIZE, unit="tokens")
    """Vocabulary size; bytes are tokens 0..255."""
    max_sequence: int = key(1024, example=2048, ge=1, le=MAX_SIZE, unit="tokens")
    """Longest sequence the model can read."""
    tied: bool = key(True)
    """Share the embedding with the output head."""

    @property
    def kv_head_count(self) -> int:
        """Key/value heads with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP with the default filled in."""
        if self.mlp is not None:
            return self.mlp
        return -(-8 * self.hidden // (3 * 64)) * 64

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
        width = self.mlp_width if experts is None else experts * self.expert_width
        router = (self.experts or 0) * self.hidden
        block = products * self.hidden**2 + 3 * self.hidden * width + router
        tables = self.vocab * (1 if self.tied else 2)
        return int(self.layers * block) + tables * self.hidden

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.experts is not None:
            if self.experts_per_token > self.experts:
                raise KeyedError(
                    f"experts_per_token: {self.experts_per_token} of experts: {self.experts}; a "
                    "token is computed by at most all of them",
                    "experts_per_token",
                    "experts",
                )
            return self
        for name in ("experts_per_token", "expert_mlp", "aux_loss"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise KeyedError(
                    f"{name}: {value} is for a mixture of experts; set experts, or remove {name}",
                    name,
                )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden % self.heads:
            raise KeyedError(
                f"hidden: {self.hidden} is not a multiple of heads: {self.heads}", "hidden", "heads"
            )
        if (self.hidden // self.heads) % 2:
            raise KeyedError(
                f"hidden: {self.hidden} / heads: {self.heads} is odd; "
                "rotary positions need an even head size",
                "hidden",
                "heads",
            )
        if self.heads % self.kv_head_count:
            raise KeyedError(
                f"heads: {self.heads} is not a multiple of kv_heads: {self.kv_heads}",
                "kv_heads",
                "heads",
            )
        return self


class ScheduleConfig(Section):
    """The learning rate over the steps, as a factor on optimizer.lr."""

    type: Literal["cosine", "constant"] = key("cosine")
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = key(0, example=20, ge=0, unit="steps")
    """Linear warm-up from zero."""
    final: float = key(0.1, example=0.0, ge=0, le=1)
    """Last learning rate of type: cosine, as a share of optimizer.lr."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate at `step` (0-based) of `steps`: warm-up, then the
        shape. It depends on the step alone: nothing to save, exact on resume."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.type == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.final + (1 - self.final) * cosine


class SampleConfig(Section):
    """Text generated before and after training."""

    prompt: str = key("ROMEO:", example="HAMLET:", min_length=1)
    """Text the sample continues."""
    length: int = key(160, example=0, ge=0, unit="bytes")
    """Bytes to generate; 0 prints no sample."""
    temperature: float = key(0.8, example=0.0, ge=0)
    """0 takes the likeliest byte; higher is more random."""


class TrainConfig(Section):
    """The model, data and length of a run of `offload train`."""

    model: ModelConfig = section(ModelConfig)
    """The built-in model."""
    text: PathText = key("shakespeare", example="book.txt")
    """shakespeare, python (the standard library's documentation and sources), or the path of a text
    file."""
    validation: float = key(0.05, example=0.1, ge=0, lt=1)
    """Share of the text, at its end, kept for validation."""
    steps: int = key(200, example=1000, ge=1)
    """Optimizer steps."""
    batch: int = key(4, example=8, ge=1, le=MAX_BATCH, unit="sequences")
    """Sequences per backward pass."""
    sequence: int = key(256, example=512, ge=1, unit="bytes")
    """Length of a sequence."""
    schedule: ScheduleConfig = section(ScheduleConfig)
    """Learning rate over the steps."""
    evaluate_every: int = key(0, example=100, ge=0, unit="steps")
    """Steps between validation losses; 0: at the end only."""
    evaluate_batches: int = key(4, example=8, ge=0, unit="batches")
    """Batches per validation loss; 0 evaluates nothing."""
    checkpoint_every: int = key(0, example=100, ge=0, unit="steps")
    """Steps between checkpoints, which are written beside the steps that follow; the last step is
    saved, too. 0: none, but for what a Ctrl-C or SIGTERM saves."""
    keep_last: int = key(2, example=3, ge=1)
    """The number of newest checkpoints that stay."""
    keep_every: int | None = key(None, example=1000, ge=1, unit="steps", absent="none of them")
    """Older checkpoints stay, too, if their step is a multiple of this number."""
    sample: SampleConfig = section(SampleConfig)
    """The text to generate, to see what was learnt."""

    @model_validator(mode="after")
    def _check_sequence(self) -> Self:
        if self.sequence > self.model.max_sequence:
            raise KeyedError(
                f"sequence: {self.sequence} is longer than model.max_sequence: "
                f"{self.model.max_sequence}; raise the latter",
                "sequence",
                "model.max_sequence",
            )
        return self
