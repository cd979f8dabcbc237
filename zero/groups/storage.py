"""The frozen weights that are stored in fewer bits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain

from offload.kernels.weight_formats import WeightFormat
from offload.tiers.errors import ConfigError
from offload.zero.groups.layout import ParamShape

HEAD = "lm_head"  # stays as it is where nothing is said: its rounding is seen in every logit
# Adapters of PEFT are small, and not rounded with the weights that they adapt, also where frozen.
# How their modules' names begin (`prefix` of PEFT's tuners; modules trained as a whole).
_ADAPTERS = (
    "adamss_", "adaption_prompt", "beft_", "boft_", "bone_", "c3a_", "deft_", "delora_",
    "fourierft_", "frod_", "glora_", "gralora_", "hada_", "hira_", "hra_", "ia3_",
    "internal_xlora_classifier", "lily_", "ln_tuning_", "lokr_", "lora_", "miss_",
    "modules_to_save", "oft_", "osf_", "peanut_", "poly_", "prompt_encoder", "psoft_", "pvera_",
    "randlora_", "road_", "shadow_", "shira_", "supertuning_", "tinylora_", "trainable_tokens_",
    "unilora_", "vblora_", "vera_", "waveft_",
)  # fmt: skip
_SHOWN = 5


@dataclass(frozen=True)
class Storage:
    """The configured storage of frozen weights."""

    format: WeightFormat
    skip: tuple[str, ...] | None = None  # None: HEAD, where there is one

    def stores(self, param: ParamShape) -> bool:
        """Return whether a parameter is stored quantized: a frozen matrix, of which no name is
        skipped. Norms and biases have one dimension, filters of convolutions more than two."""
        return (
            not param.trainable
            and _is_matrix(param)
            and not any(self._skips(name) for name in param.names)
        )

    def _skips(self, name: str) -> bool:
        if any(part.startswith(_ADAPTERS) for part in name.split(".")):
            return True
        return any(is_named(name, each) for each in ((HEAD,) if self.skip is None else self.skip))

    def check(self, params: Sequence[ParamShape]) -> None:
        """Raise ConfigError if a pattern names nothing, or nothing is left to be stored."""
        for pattern in self.skip or ():
            if not any(is_named(name, pattern) for param in params for name in param.names):
                raise ConfigError(
                    f"storage.skip: {pattern!r} names no module and no parameter of the model "
                    f"(it has {_listing(_last_names(params))}); correct it, or remove it"
                )
        stored = [param for param in params if self.stores(param)]
        if not stored:
            raise ConfigError(f"storage.weights: {self.format.name}: {self._why_none(params)}")
        refused = {p.name: why for p in stored if (why := self.format.refusal(p.shape))}
        for name, why in refused.items():
            raise ConfigError(
                f"storage.group_size: {self.format.group_size}: {name} cannot be stored in "
                f"{self.format.name}: {why}; set another storage.group_size, or add to "
                f"storage.skip what has such a shape ({_listing(list(refused))})"
            )

    def _why_none(self, params: Sequence[ParamShape]) -> str:
        frozen = [param for param in params if not param.trainable]
        if not frozen:
            return (
                "all parameters are trained, and a trained weight is not stored quantized; freeze "
                "some before offload.initialize (peft.get_peft_model does), or remove storage"
            )
        left = [param for param in frozen if _is_matrix(param)]
        if not left:
            return "no frozen parameter is a matrix; remove storage"
        names = _listing([param.names[0] for param in left])
        return f"every frozen matrix is skipped ({names}); shorten storage.skip, or remove storage"


def _is_matrix(param: ParamShape) -> bool:
    """Return whether it is a weight of a linear layer or embedding, or of all packed experts."""
    if 0 in param.shape:
        return False
    if len(param.shape) == 3:
        return any(names_experts(part) for name in param.names for part in name.split("."))
    return len(param.shape) == 2


def names_experts(name: str) -> bool:
    """Return whether a module with this name, that of its own alone, has experts."""
    return name == "experts" or name.endswith("_experts")


def is_named(name: str, pattern: str) -> bool:
    """Return whether a parameter's name, or that of a module that it is in, is `pattern` or ends
    with it (`lm_head`, `mlp.down_proj`, `layers.0`); `pattern` may have fnmatch's wildcards."""
    return any(fnmatchcase(part, pattern) for part in _parts(name))


@cache
def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of `a.b.weight`: a, a.b, a.b.weight, b, b.weight, weight. PEFT's names also
    have those of the base model, an expert's row those of its packed parameter."""
    plain = [part.partition("[")[0] for part in name.split(".")]
    base = [part for part in plain if part != "base_layer"]
    return tuple(dict.fromkeys(chain(_runs(plain), _runs(base))))


def _runs(parts: Sequence[str]) -> Iterator[str]:
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])


def _last_names(params: Sequence[ParamShape]) -> list[str]:
    """Return names of the innermost modules."""
    names = (name.rpartition(".")[0].rpartition(".")[2] for p in params for name in p.names)
    return [name for name in dict.fromkeys(names) if name and not name.isdigit()]


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
