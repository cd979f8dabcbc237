"""`offload.dispatch`: a model that computes from the tiers, and does not train.

Its weights are those of a `WeightStore`. There is no gradient, optimizer state or update.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.config import OffloadConfig
from offload.config.paths import StrPath
from offload.display.words import some_of
from offload.memory.kv_homes import cached_layers
from offload.models.foreign_wrappers import refuse_foreign_wrappers
from offload.process import machine
from offload.report import TierTraffic
from offload.swap.threads.lanes import waits_s
from offload.tiered_model import DTYPES, Closed, TieredModel, refuse_shared
from offload.tiers.errors import StateError, UnsupportedError
from offload.tiers.units import format_bytes
from offload.weights.lazy_tensors import LazyWeights
from offload.weights.safetensors_weights import first_weights
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec
from offload.zero.groups.parameter_grouping import ParameterGrouping, managed, refuse_uninitialised
from offload.zero.groups.store import WeightStore
from offload.zero.groups.weight_values import WeightValues
from offload.zero.hooks.unit_hooks import UnitHooks

_log = logging.getLogger("offload")
M = TypeVar("M", bound=nn.Module)
_CONTAINERS = (nn.ModuleDict, nn.ModuleList)


def dispatch(
    model: M,
    config: StrPath | Mapping[str, Any] | OffloadConfig | None = None,
    *,
    weights: StrPath | None = None,
) -> M:
    """Spread the model's weights over tiers and let it compute from there: forward, `generate`.

    Returns `model`, the same object; `dispatched(model)` returns the owner of its tiers. Tokens and
    logits are those of the model in RAM, to the bit.

    `model` is on the CPU or on the meta device, with `weights` (a safetensors file or folder, or a
    checkpoint), or from `offload.open_pretrained`; the last two are never whole in RAM. Its
    parameters get no gradients; those that still require one keep that, since PyTorch multiplies
    with them in another way, and a backward that comes to one is an UnsupportedError.

    `config`: the path of a YAML file, a mapping with its keys, or an OffloadConfig. What only
    training uses is ignored. Without `precision` the model computes in the formats of its own
    weights; with `placement: auto` they are on host if they fit into its budget, else as many as
    fit are, and the rest is on nvme.

    Ranks share no weights: each has its own, or of a model of `parallelize_module` its own part.

    Raises ConfigError, PathError or BudgetError before anything is allocated; UnsupportedError for
    a model that cannot compute this way, naming the part; StateError if it trains through an
    engine or was dispatched before.
    """
    loaded = OffloadConfig.load({} if config is None else config)
    refuse_shared(model)
    refuse_uninitialised(model)
    chosen, only = _precision(loaded, model)
    with torch.inference_mode(False), first_weights(model, weights, only) as lazy:
        Dispatched(model, chosen, lazy, only=only)
    return model


def dispatched(model: nn.Module) -> Dispatched:
    """Return the owner of the tiers of a dispatched model (or of the model that a module wraps).
    Raises StateError if there is none."""
    for module in model.modules():
        owner = UnitHooks.owner_of(module)
        if isinstance(owner, Dispatched):
            return owner
    raise StateError(
        f"{type(model).__name__} is not dispatched: offload.dispatch(model, config) does that (of "
        "a model that trains, engine = offload.initialize(model, config) has plan and report)"
    )


class Dispatched(TieredModel):
    """Owns the tiers of one dispatched model, for as long as there is the model. A context manager;
    `close` gives everything back.

    `module` is the model, `device` where it computes and wants its inputs, `config` the
    configuration with every `auto` resolved, `plan` the tier of each group of weights.
    """

    _CLOSED = Closed(
        "this dispatched model's tiers are closed", "build it anew",
        "offload.dispatched(model).close(keep='host')",
    )  # fmt: skip
    _TAKEN = (
        "%s is of a model that is dispatched: one parameter cannot be in two places. Close that "
        "one first, which gives the parameters back (offload.dispatched(model).close(keep='host'))"
    )

    def __init__(
        self, model: nn.Module, config: OffloadConfig, lazy: LazyWeights, *,
        only: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        config = config.for_inference()
        super().__init__(model, config)
        if self.spread.ep_size > 1:
            raise UnsupportedError(
                f"ep_size {self.spread.ep_size}: experts of a dispatched model are on each rank, "
                "which has those that fit in memory and the others on nvme; set ep_size=1"
            )
        self._hooks: dict[int, RemovableHandle] = {}  # by the parameter's id
        grouping = self._group_parameters(config, frozen=True, only=only).stored(config.stored)
        if config.placement.kv is not None:
            grouping.cached = cached_layers(model)
        try:
            self._find_tensor_parallel(config, [machine.rank_here()])
            self._build(config, grouping, lazy, only)
        except BaseException:
            self.close("drop")
            raise
        self._close_with(model, self._tier_manager.close)  # which keeps no part of the model

    def _build(
        self, config: OffloadConfig, grouping: ParameterGrouping, lazy: LazyWeights,
        only: torch.dtype | None,
    ) -> None:  # fmt: skip
        dtype = DTYPES[config.precision]
        _check_values(self.module, lazy, only)
        self._make_plan(config, grouping)
        first = self._initialisation(grouping, dtype, lazy, only)
        self._open_tiers(config, dtype)
        self._store = WeightStore(
            grouping, self._tier_manager, dtype, self.device,
            prefetch=int(self.config.prefetch), multiply_quantized=True,
        )  # fmt: skip
        self._store.closed = self._CLOSED.text
        self._tier_manager.let_wait(lambda: False)  # no update will give back copies
        self._load(first)
        if self._tensor_parallel is not None:  # they have agreed on first values, and share no more
            self._tensor_parallel.ranks.watch.close()
        self.values = WeightValues(self._store)
        self._give_out_values()
        self._attach_experts()
        # models in a list or a dictionary are called one by one
        parts = list(self.module.children()) if isinstance(self.module, _CONTAINERS) else []
        store = self._store  # the model keeps it
        store.start(self.module, self.values, self, self._begin_forward, parts)
        # the first passes fetch ahead, too, as if they came in the model's order
        for number, part in enumerate(parts or [self.module]):
            within = {id(module) for module in part.modules()}
            units = [unit for unit in store.units if id(unit.module) in within]
            uses = [store.groups[index] for unit in units for index in unit.groups]
            expected = [group.index for group in uses if store.table_of(group) is None]
            store.trace.assume(expected, number)
        self._refuse_gradients()
        refuse_foreign_wrappers(self._store)
        self._keep_caches(weakref.proxy(store.fetcher))  # a cache may outlive the model

    def _load_group(self, group: ParamGroup, values: Callable[[ParamSpec], torch.Tensor]) -> None:
        self.store.load(group, values)

    def _begin_forward(self, part: int) -> None:
        if torch.is_grad_enabled():
            self._refuse_gradients()
        self.store.begin_forward(part)

    def _refuse_gradients(self) -> None:
        """Let a gradient raise for each parameter that requires one now."""
        with torch._C.DisableTorchFunctionSubclass():
            for group in self.store.groups:
                for param, spec in zip(group.params, group.layout.params, strict=True):
                    if param.requires_grad and id(param) not in self._hooks:
                        refuse = partial(_refuse_gradient, spec.name)
                        hook = param.register_post_accumulate_grad_hook(refuse)
                        self._hooks[id(param)] = hook

    def keep_cache(self, cache: Any) -> None:
        """Let a transformers cache live where `placement.kv` says, before the model is called."""
        if self._kv is not None:
            from offload.kv.paged_cache import keep_in_tiers  # imports transformers

            keep_in_tiers(cache, self._kv)

    def report(self) -> TierTraffic:
        """Return bytes per tier, bytes moved, and seconds waited so far. It waits for nothing:
        numbers of operations in progress may change while they are read."""
        lanes = [*self._tier_manager.lanes(), *self.store.ranks.lanes()]
        return TierTraffic(**self._seen(), waits=waits_s(lanes))

    def _close(self) -> None:
        if self._store is None:
            super()._close()
            return
        with self._store.one_thread:  # no other thread is in a call of the model
            super()._close()

    def _close_all(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        try:
            if self._store is not None:
                self._store.close(self._why_without)
        finally:
            tier_manager = getattr(self, "_tier_manager", None)
            if tier_manager is not None:
                tier_manager.close()


def _refuse_gradient(name: str, param: torch.Tensor) -> None:
    param.grad = None
    raise UnsupportedError(
        f"{name} got a gradient, and a dispatched model does not train: compute under "
        "torch.no_grad(), freeze it (model.requires_grad_(False)) where something around it "
        "trains, or train it with offload.initialize"
    )


def _check_values(model: nn.Module, lazy: LazyWeights, only: torch.dtype | None) -> None:
    """Raise UnsupportedError for floating-point parameters that stay in the model without values,
    and warn about parameters that get random ones."""
    named = [(name, p) for name, p in model.named_parameters() if p.is_meta and p not in lazy]
    for name, param in named:
        if managed(param) and not managed(param, only):
            raise UnsupportedError(
                f"{name} is {param.dtype} on the meta device, other than most weights; say with "
                "weights= where its values are, or name precision: in the configuration"
            )
    if named:
        _log.warning(
            "%s are on the meta device, and no files were named: they get random values, as their "
            "modules begin with; say with weights= where their values are",
            some_of([name for name, _ in named]),
        )  # fmt: skip


def _precision(config: OffloadConfig, model: nn.Module) -> tuple[OffloadConfig, torch.dtype | None]:
    """Return the configuration, and the only format that is moved (None for all). If no precision
    is set, both take the format of most weights; those in another one (transformers keeps some of
    some models in fp32) stay as they are, in RAM."""
    named = [(name, param) for name, param in model.named_parameters() if managed(param)]
    numels: Counter[torch.dtype] = Counter()
    for _, param in named:
        numels[param.dtype] += param.numel()
    if "precision" in config.model_fields_set or not numels:
        width = DTYPES[config.precision].itemsize
        wide = [each for each in named if each[1].dtype.itemsize > width]
        if wide and len(wide) < len(named):
            _log.warning(
                "precision: %s rounds %s, which have more bits than the other weights",
                config.precision, some_of([name for name, _ in wide]),
            )  # fmt: skip
        return config, None
    common = numels.most_common(1)[0][0]
    formats = [name for name, known in DTYPES.items() if known is common]
    if not formats:
        raise UnsupportedError(
            f"most weights are {common}, which the tiers do not hold; name precision: "
            f"{', '.join(DTYPES)} in the configuration, which casts them"
        )
    others = [(name, param) for name, param in named if param.dtype is not common]
    if others:
        _log.warning(
            "%s are not %s as most weights, and stay in RAM beside the tiers (%s); precision: in "
            "the configuration would cast them", some_of([name for name, _ in others]), formats[0],
            format_bytes(sum(param.nbytes for _, param in others)),
        )  # fmt: skip
    return config.model_copy(update={"precision": formats[0]}), common
