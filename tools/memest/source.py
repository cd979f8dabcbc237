"""Whatever memest can be asked about, as one kind of thing: a model's shape and its activations."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from offload.config import OffloadConfig
from offload.config.training import ModelConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.workload import Workload
from offload.tiers.errors import UnsupportedError
from offload.tools.memest.facts_cache import cached_facts
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import nn


class SourceKind(enum.StrEnum):
    """What a model was read from."""

    CONFIGURATION = "configuration"  # a Hugging Face config.json
    SAFETENSORS = "safetensors"
    FACTORY = "factory"  # module:function
    YAML = "yaml"  # an offload configuration: the built-in model
    STATED = "stated"  # numbers


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be asked about.

    `shape` has the groups that `discover` finds in the module that will be trained.
    """

    name: str
    kind: SourceKind
    shape: ModelShape
    fingerprint: str  # of all that the model's graph depends on
    location: str | None = None  # where it was read from, for others to read it again
    context: int | None = None  # longest sequence in tokens, where one is known
    vocab: int | None = None
    notes: tuple[str, ...] = ()  # what was assumed, left aside, or took long
    config: OffloadConfig | None = None  # of an offload YAML
    train_model: ModelConfig | None = None  # `train.model` that gives this model, if one does
    build: Callable[[], nn.Module] | None = None  # the module on the meta device; loads torch
    # one whose trace is the same for sequences of a length, and which is there sooner
    stand_in: Callable[[int], nn.Module | None] | None = None
    traced: Callable[[int], str] | None = None  # whose modules are, for sequences of a length

    @property
    def has_graph(self) -> bool:
        """Whether the model's code is known; weights alone do not say what it keeps."""
        return self.build is not None

    def without_graph(self, reason: str) -> ModelSource:
        """The same states of a model whose code cannot be followed, for `reason`."""
        note = f"activations are not counted, and there are no times: {reason}"
        return replace(self, build=None, notes=(*self.notes, note))

    def activations(
        self, config: OffloadConfig, workload: Workload, device: str | None = None
    ) -> ActivationFacts:
        """Bytes and operations of one forward and backward pass, from the module's own graph.

        `device` (cpu, cuda): whose kernels are meant, by default those of `config`. Loads torch and
        takes seconds unless the answer is on disk. UnsupportedError where no code is known.
        """
        if self.build is None:
            raise UnsupportedError(
                f"{self.name}: weights alone do not tell what forward keeps; put the config.json "
                "beside them, or name the model's module:function"
            )
        build = partial(self._module, self.build, workload.sequence)
        return cached_facts(self.fingerprint, build, config, workload, device)

    def _module(self, build: Callable[[], nn.Module], sequence: int) -> nn.Module:
        found = self.stand_in(sequence) if self.stand_in is not None else None
        return build() if found is None else found
