"""A model that memest reads, from any source: its shape, and the activations of its passes."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.config import OffloadConfig
from offload.config.training import ModelConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.estimate import Workload
from offload.process import disk_cache
from offload.tiers.errors import OffloadError, UnsupportedError
from offload.tools.memest.generation import CacheShape
from offload.tools.memest.source.input_files import one_line
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import nn


class SourceKind(enum.StrEnum):
    """The kind of source that a model was read from."""

    CONFIGURATION = "configuration"  # a Hugging Face config.json
    SAFETENSORS = "safetensors"
    FACTORY = "factory"  # module:function
    YAML = "yaml"  # an offload configuration: the built-in model
    STATED = "stated"  # numbers


class UntraceableError(UnsupportedError):
    """A model whose code cannot be followed without values: only its states are known."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model as memest knows it.

    `shape` has the groups that `group_parameters` finds in the module that will be trained.
    """

    name: str
    kind: SourceKind
    shape: ModelShape
    fingerprint: str  # of all that the model's graph depends on
    location: str | None = None  # where it was read from, so that it can be read again
    context: int | None = None  # longest sequence in tokens, where one is known
    notes: tuple[str, ...] = ()  # assumptions, ignored entries, long steps
    config: OffloadConfig | None = None  # of an offload YAML
    train_model: ModelConfig | None = None  # `train.model` that gives this model, if one does
    build: Callable[[], nn.Module] | None = None  # of its modules on the meta device; loads torch
    precision: str | None = None  # that its weights are said to be in
    find_cache: Callable[[], CacheShape | None] | None = None  # of keys and values

    @cached_property
    def cache(self) -> CacheShape | None:
        """The cache of keys and values, where it is known."""
        return None if self.find_cache is None else self.find_cache()

    @property
    def has_graph(self) -> bool:
        """Whether the model's code is known; weights alone do not reveal what it keeps."""
        return self.build is not None

    @property
    def is_pretrained(self) -> bool:
        """Whether it has weights already: a folder or a file of a hub describes it."""
        return self.kind in (SourceKind.CONFIGURATION, SourceKind.SAFETENSORS)

    def activations(
        self, config: OffloadConfig, workload: Workload, device: str, *, trains: bool = True
    ) -> ActivationFacts:  # fmt: skip
        """Return the bytes and operations of one forward and, if it `trains`, backward pass, from
        the module's own graph; or of a forward alone without a cache.

        `device` (cpu, cuda): the device whose kernels run. Loads torch and takes seconds unless the
        answer is on disk. Raise UnsupportedError if no code is known, or if it fails for this
        input; UntraceableError if it cannot be followed.
        """
        if self.build is None:
            raise UnsupportedError(
                f"{self.name}: weights alone do not tell what forward keeps; put the config.json "
                "beside them, or name the model's module:function"
            )
        find = partial(_traced, self.build, config, workload, device, trains)
        if self.fingerprint:
            parts = {**_pass_parts(config, workload, device), "trains": trains}
            key = key_of({"model": self.fingerprint, **parts})
            facts = disk_cache.remembered("activations", key, ActivationFacts | str, find)
        else:
            facts = find()
        if isinstance(facts, str):
            raise UntraceableError(facts)
        return facts


def _traced(
    build: Callable[[], nn.Module], config: OffloadConfig, workload: Workload, device: str,
    trains: bool,
) -> ActivationFacts | str:  # fmt: skip
    """Return the facts, or the reason why the model's code cannot be followed."""
    from offload.planning.activations.trace import trace_activations

    model = build()
    try:
        return trace_activations(model, config, workload, device=device, trains=trains)
    except UnsupportedError as error:
        return str(error)
    except OffloadError:
        raise
    except Exception as error:  # the model's own code: sizes that only it finds out about
        raise UnsupportedError(
            f"{type(model).__name__}: its forward fails for {workload.batch} x {workload.sequence} "
            f"tokens: {one_line(error)}"
        ) from error


def _pass_parts(config: OffloadConfig, workload: Workload, device: str) -> dict[str, Any]:
    """Return everything except the model that a trace depends on."""
    return {
        "format": 3,  # of the answer
        "torch": metadata.version("torch"),
        "device": device,
        "precision": config.precision,
        "blocks": config.groups.blocks,
        "recompute": config.placement.activations.checkpoint,
        "chunked loss": config.loss.chunked,
        "tiled MLP": config.placement.activations.tiled_mlp,
        "batch": workload.batch,
        "sequence": workload.sequence,
    }


def key_of(parts: Mapping[str, Any]) -> str:
    """Return a key for all inputs of an answer: `parts`, and the code that computes it."""
    return disk_cache.key_of({"code": _code(), **parts})


@cache
def _code() -> str:
    """Return a digest of the sources that compute shapes and facts, which answers depend on."""
    root = Path(__file__).parents[3]  # the package: its folders, and links to them
    digest = hashlib.sha256()
    folders = ("config", "losses", "planning", "zero", "tools/memest/source")
    inside = (path for folder in folders for path in sorted((root / folder).glob("**/*.py")))
    for path in (root / "gpt.py", *inside):
        digest.update(path.read_bytes())
    return digest.hexdigest()
