"""The engine's optimizer: a `torch.optim.Optimizer` whose states live in tiers.

Learning-rate schedulers, `param_groups` with their own numbers, `zero_grad` and `state_dict` work
as with any optimizer. `step` returns when the update of every group is decided; reading a parameter
waits for that parameter's group.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.config.optimizer import KINDS
from offload.optimizers.entries import OptimizerEntries, refuse_writing
from offload.optimizers.matrices import USE_MUON, kind_of
from offload.optimizers.state_dict import Kept, check_kind, check_sizes, check_state
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import ConfigError, StateError, UnsupportedError
from offload.zero.groups.store import WeightStore
from offload.zero.groups.values import ParameterValues
from offload.zero.hooks.compilers import uncompiled
from offload.zero.step.optimizer_state import Hyper, HyperOf
from offload.zero.step.runtime import Runtime
from offload.zero.step.stepper import StepOutcome

if TYPE_CHECKING:
    from offload.config.optimizer import OptimizerConfig

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class OffloadOptimizer(torch.optim.Optimizer):
    """`engine.optimizer`: adamw, adam, lion, adagrad, sgd or muon (`optimizer.type`), with its
    states in the tiers of its engine.

    Schedulers of torch.optim, `param_groups` and hooks work on it as on any optimizer; `state`
    reads states when they are asked for, and `state_dict()` has copies of all. `last_step` is None
    before the first step, then has its `gradient_norm` (unscaled, before clipping) and whether it
    was `skipped`. It cannot be copied or pickled.
    """

    def __init__(
        self, runtime: Runtime, values: ParameterValues, params: Params, config: OptimizerConfig
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._values = values
        self._kinds = config.kinds
        self._numbers_of = {kind: config.numbers_of(kind) for kind in config.kinds}
        kept = ((each, KINDS[each].scalars.kept_for(n)) for each, n in self._numbers_of.items())
        self._states = dict(kept)
        self._entries = OptimizerEntries(
            values, self._managed, self._kept_or_none, self._start_over
        )
        self.last_step: StepOutcome | None = None
        self.engine: Any = None  # kept alive with this optimizer
        super().__init__(params, {} if len(self._kinds) > 1 else config.numbers)

    def serve(self, engine: Any) -> None:
        """Be the one that steps: updates in backward go by its param groups."""
        self.engine = engine
        this = weakref.ref(self)  # the runtime must not keep the engine alive
        self._runtime.stepper.policy.hyper_source = lambda: _alive(this).hyper_of()

    @property
    def state(self) -> Any:
        """The states of each parameter, read when asked for: see `OptimizerEntries`. An empty
        mapping in its place (BAdam sets one at each change of the block) drops all states."""
        return self._entries

    @state.setter
    def state(self, entries: Mapping[Any, Any]) -> None:
        if hasattr(self, "param_groups"):  # else torch.optim is making it
            self._start_over() if not entries else refuse_writing()

    def _start_over(self) -> None:
        """Drop all states: the next update of each parameter is its first one."""
        self._write_states([(param, {}) for param in self._entries])

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step updated nothing, for infinite or NaN gradients."""
        return self.last_step is not None and self.last_step.skipped

    @property
    def has_scheduler(self) -> bool:
        """Whether a scheduler of torch's (transformers' are) was made for it: that marks `step`.
        ReduceLROnPlateau does not."""
        return hasattr(self.step, "_wrapped_by_lr_sched")

    def _managed(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch. Raises ConfigError for numbers that cannot work or
        parameters not managed here."""
        # torch's own method without the wrapper that keeps the compiler out of it: that imports
        # torch._dynamo, two seconds and 80 MiB for nothing, since nothing here is compiled
        if len(self._kinds) > 1 and isinstance(param_group, dict):
            kind = kind_of(param_group, self._kinds)
            param_group = {**self._numbers_of[kind], USE_MUON: kind == "muon", **param_group}
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
        added = self.param_groups[-1]
        try:
            self._check(added)
        except BaseException:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        self._hyper(group)
        for param in group["params"]:
            spec = self._runtime.store.spec_of(param)
            if spec is None:
                raise ConfigError(
                    f"a parameter of shape {tuple(param.shape)} and dtype {param.dtype} is not "
                    "one of the model given to offload.initialize (or is no real floating point)"
                )
            is_matrix, wanted = self._has_matrix(param), bool(group.get(USE_MUON))
            if param.requires_grad and is_matrix != wanted:
                raise ConfigError(
                    f"{spec.name} is in a param group with use_muon={wanted}, and its states are "
                    f"those of {'Muon' if is_matrix else 'AdamW'}; say which one trains it before "
                    "offload.initialize, in `parameters` or as the parameter's attribute use_muon"
                )

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        """Return the group's numbers. Raises here, before any update is pending, for numbers that
        no update can use."""
        for key in ("lr", "weight_decay"):
            if float(group[key]) < 0:
                raise ValueError(f"{key}: expected 0 or more, got {group[key]}")
        kind = kind_of(group, self._kinds)
        needed, kept = set(KINDS[kind].scalars.kept_for(group)), set(self._states[kind])
        if not needed <= kept or "max_exp_avg_sq" in kept - needed:
            raise UnsupportedError(
                f"a param group needs the states {', '.join(sorted(needed)) or '(none)'} and this "
                f"optimizer keeps {', '.join(self._states[kind]) or 'none'}; set amsgrad, or a "
                "momentum above 0 if it is ever to be raised, under optimizer: in the configuration"
            )
        hyper = Hyper(KINDS[kind].scalars, tuple(KINDS[kind].numbers(group).items()))
        hyper.scalars(step=1, grad_scale=1.0)
        return hyper

    def hyper_of(self) -> HyperOf:
        """Return a function for each parameter's numbers as the param groups have them now; None
        for a parameter in no group.

        Raises ValueError or UnsupportedError for numbers that no update could be made with.
        """
        hypers: dict[int, Hyper] = {}
        for group in self.param_groups:
            hypers.update(dict.fromkeys(map(id, group["params"]), self._hyper(group)))
        whole = self._runtime.store.whole
        return lambda param: hypers.get(whole.get(id(param), id(param)))

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients. Returns the closure's loss, if given.

        It returns when the norm is known and every update is decided; each update runs before its
        group is read next, and its errors are raised there. Raises StateError inside
        `engine.gathered`, and for fewer passes since the last step than gradient_accumulation_steps
        says; NonfiniteError at the end of a skipped step, if it is the last of `max_skipped_steps`
        in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @defer_signals
    @torch.no_grad()
    def _step(self) -> None:
        self.last_step = self._runtime.step(self.hyper_of())
        self._runtime.stepper.nonfinite.check()

    @uncompiled
    @defer_signals
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as in torch; a pending update keeps those that it has yet to read."""
        params = self._managed()
        with torch._C.DisableTorchFunctionSubclass():  # of a released parameter
            gradients = [] if set_to_none else [param.grad for param in params]
            if set_to_none:
                for param in params:
                    param.grad = None
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        self._runtime.drop_cleared_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return states and param groups, in torch's format, as copies that later steps do not
        change.

        They are whole in RAM: `engine.save_checkpoint` streams instead.
        """
        index = 0
        packed_groups, state = [], {}
        for group in self.param_groups:
            numbers = {key: value for key, value in group.items() if key != "params"}
            ids = list(range(index, index + len(group["params"])))
            for number, param in zip(ids, group["params"], strict=True):
                values = self._values.read_state(param)
                if values:
                    state[number] = values
            index += len(ids)
            packed_groups.append({**numbers, "params": ids})
        return {"state": state, "param_groups": packed_groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of an optimizer of the same parameters returned, this one's
        or one of torch.optim's.

        Raises ValueError or UnsupportedError, and changes nothing, if it is of another kind, or of
        other parameters.
        """
        self._runtime.store.one_thread.check_awake()  # before anything is written
        check_sizes(self.param_groups, state_dict)
        numbers, states = [], []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            given = {key: copy.deepcopy(value) for key, value in saved.items() if key != "params"}
            self.check_numbers(group, given)
            numbers.append(given)
            for param, number in zip(group["params"], saved["params"], strict=True):
                state = state_dict["state"].get(number, {})
                states.append((param, check_state(self._kept(param), param, state)))
        self._write_states(states)
        for group, given in zip(self.param_groups, numbers, strict=True):
            group.update(given)

    def _write_states(self, states: Iterable[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        try:
            for param, state in states:
                self._values.write_state(param, state)
        except BaseException:
            self._runtime.store.unusable = self._runtime.store.unusable or (
                "loading an optimizer's state dict failed half-way, so states are a mixture; "
                "load a checkpoint, or make a new engine"
            )
            raise

    def check_numbers(self, group: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        """Raise ValueError or UnsupportedError unless saved numbers can take the place of a param
        group's."""
        check_kind(kind_of(group, self._kinds), {**self.defaults, **group}, numbers)
        try:
            self._hyper({**group, **numbers})
        except (TypeError, OverflowError) as error:
            raise ValueError(f"no update can be made with it: {error}") from None

    def _kept(self, param: nn.Parameter) -> Kept:
        kept = self._kept_or_none(param)
        assert kept is not None, "checked when the param group was added"
        return kept

    def _kept_or_none(self, param: Any) -> Kept | None:
        spec = self._runtime.store.spec_of(param)
        if spec is None:
            return None
        kind = kind_of({USE_MUON: self._has_matrix(param)}, self._kinds)
        counts = KINDS[kind].scalars.counts_steps
        return Kept(spec.name, tuple(spec.shape), self._states[kind], counts)

    def _has_matrix(self, param: nn.Parameter) -> bool:
        """Return whether a parameter's states are Muon's."""
        place = self._runtime.store.places_of(param)
        return bool(place) and place[0][0].matrices

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UnsupportedError. Called by copy and pickle."""
        raise UnsupportedError(
            "an optimizer of offload cannot be copied or pickled: its states live in the tiers of "
            "its engine; keep optimizer.state_dict(), or engine.save_checkpoint(path)"
        )


@functools.cache
def optimizer_class(kind: str) -> type[OffloadOptimizer]:
    """Return the class of an `optimizer.type`: it has the name of torch's class with that rule
    (AdamW, SGD), by which loggers name what they log."""
    named = {name.lower(): name for name in dir(torch.optim)}
    body = {"__doc__": OffloadOptimizer.__doc__, "__module__": OffloadOptimizer.__module__}
    return type(named.get(kind, kind.capitalize()), (OffloadOptimizer,), body)


def _alive(reference: weakref.ref[OffloadOptimizer]) -> OffloadOptimizer:
    optimizer = reference()
    if optimizer is None:
        raise StateError("this engine's optimizer is gone; keep engine.optimizer while training")
    return optimizer


# ---------------------------------------------------------------- other optimizers
def refuse_foreign_optimizers(store: WeightStore) -> None:
    """Refuse other optimizers over the store's parameters until it is closed.

    `torch.optim.AdamW(model.parameters())`, or a trainer that makes its own optimizer, would keep
    its states in RAM, outside of every budget, and page each weight through memory to change it.
    """
    _listen()
    _watched.add(store)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _watched or _is_offloads(optimizer):
        return
    for store in list(_watched):
        if store.unusable is None:
            _refuse(optimizer, store)


# One hook for all models, for good (see `foreign_wrappers`).
_watched: weakref.WeakSet[WeightStore] = weakref.WeakSet()
_listen = functools.cache(lambda: register_optimizer_step_pre_hook(_check))


def _is_offloads(optimizer: Any) -> bool:
    """Return whether an optimizer is an OffloadOptimizer, or wraps one."""
    while optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if inner is not optimizer else None
    return optimizer is not None


def _refuse(optimizer: torch.optim.Optimizer, store: WeightStore) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            spec = store.spec_of(param)
            if spec is not None:
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step(): {spec.name} trains through an offload "
                    "engine, and only engine.optimizer keeps its states in the tiers; use that "
                    "(transformers: Trainer(..., optimizers=(engine.optimizer, None))), and set "
                    "what this optimizer was made with under optimizer: in the configuration"
                )
