"""The base of models whose weights are in tiers, shared by `engine.py`, which trains, and
`inference.py`.

check ▶ group ▶ plan ▶ open tiers ▶ store ▶ load ▶ experts, state dicts ▶ hooks
"""

import _thread
import abc
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, cast

import torch
from torch import nn

from offload.config import OffloadConfig
from offload.display.byte_progress import progress, say
from offload.kv.store import KVStore
from offload.memory.kv_homes import keep_caches
from offload.memory.preflight import divided_gpu, preflight
from offload.memory.tier_manager import TierManager, compute_device, nvme_paths, this_machine
from offload.models.closing import GivenBack, Keep
from offload.models.conversions import Conversions
from offload.models.foreign_wrappers import refuse_wrapped
from offload.models.state import StateDictHooks
from offload.moe import Experts
from offload.planning.choice.planner import make_plan, resolved_config
from offload.planning.plan.builder import within_gpu_budget
from offload.planning.plan.plan import Plan
from offload.process import machine
from offload.report import tier_reports
from offload.swap.states.fetching import Fetcher
from offload.swap.threads.shield import defer_signals
from offload.tiers import accelerator
from offload.tiers.errors import (
    BudgetError,
    ConfigError,
    OffloadError,
    RankError,
    StateError,
    UnsupportedError,
)
from offload.tiers.placement import Placement
from offload.weights.initialisation import WeightInitialisation
from offload.weights.lazy_tensors import LazyWeights
from offload.weights.materialise import make_real
from offload.weights.spread_experts import SpreadExperts
from offload.zero.experts.packed_values import ExpertAccess
from offload.zero.gradients.gradient_hooks import is_trained_here
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec
from offload.zero.groups.parameter_grouping import (
    ParameterGrouping,
    group_parameters,
    refuse_uninitialised,
)
from offload.zero.groups.shared_views import refuse_shared_views
from offload.zero.groups.store import WeightStore
from offload.zero.groups.weight_values import WeightValues
from offload.zero.hooks.unit_hooks import UnitHooks
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.sharding import ALONE
from offload.zero.ranks.tensor_parallel import TensorParallel
from offload.zero.tensors.local_tensors import hold, local_of, memory_of
from offload.zero.tensors.released import why_closed

_log = logging.getLogger("offload")
OnUse = Literal["raise", "wake"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Closed:
    """The error texts of a model whose tiers are closed."""

    what: str
    again: str  # how to go on
    keep: str  # what would have kept the parameters

    @property
    def text(self) -> str:
        """The error of a use after closing."""
        return f"{self.what}; {self.again}"

    def without_values(self, why: str) -> str:
        """The error of a use of parameters that were dropped."""
        return (
            f"{self.what}, and the model's parameters are gone ({why}); build the model anew "
            f"({self.keep} would have kept them)"
        )


class TieredModel(abc.ABC):
    """Owns the tiers of one model. A context manager; `close` gives everything back.

    `module` is the model, `device` where it computes and wants its inputs, `config` the
    configuration with every `auto` resolved, `plan` each state's tier.
    """

    plan: Plan
    config: OffloadConfig
    values: WeightValues
    _tier_manager: TierManager

    def __init__(self, model: nn.Module, config: OffloadConfig) -> None:
        self.module = model
        self.device = compute_device(config)
        self._closed = False
        self._pid = os.getpid()
        self._before_close: list[Callable[[], None]] = []
        self._store: WeightStore | None = None
        self._kv: KVStore | None = None
        self.ranks: Ranks | None = None  # those with other data
        self._tensor_parallel: TensorParallel | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._why_dropped = "close(keep='drop')"  # the parameters, where they were
        self._back: GivenBack | None = None  # while the model gets its parameters back
        self._given = {id(param): param.dtype for param in model.parameters()}
        self._moved: list[torch.Tensor] = []  # the model's own tensors that left the device
        _check_model(model)
        self.spread = SpreadExperts(model)

    # ---------------------------------------------------------------- building
    def _group_parameters(
        self, config: OffloadConfig, *, frozen: bool = False, only: torch.dtype | None = None
    ) -> ParameterGrouping:
        """Return groups and units (see `group_parameters`), for weights that are not stored yet."""
        grouping = group_parameters(
            self.module, config.groups.blocks,
            experts=config.splits_experts(machine.world_size()), frozen=frozen,
            only=only,
        )  # fmt: skip
        self.spread.check_groups(grouping.groups)
        return grouping

    def _find_tensor_parallel(self, config: OffloadConfig, data_ranks: Sequence[int]) -> None:
        """Find the ranks that have other parts of the same parameters."""
        self._tensor_parallel = TensorParallel.find(
            self.module.named_parameters(), data_ranks, self.device, config.zero.timeout_s
        )

    def _make_plan(self, config: OffloadConfig, grouping: ParameterGrouping) -> None:
        """Make the plan of tiers. Raises BudgetError, ConfigError or PathError if there is none."""
        sharding = ALONE if self.ranks is None else self.ranks.sharding
        hardware = this_machine(config.nvme, self.device, sharding)
        shape = grouping.shape()
        written_for, numel = config.written_for, shape.numel_of_all_ranks
        if written_for is not None and written_for.parameters != numel:
            _log.warning(
                "this configuration was written for %s, and %s has %s: budgets, placement and "
                "chunks were chosen for the other one",
                written_for, type(self.module).__name__, f"{numel:,}",
            )  # fmt: skip
        self.plan = make_plan(config, shape, hardware)
        self.config = resolved_config(config, self.plan, self.device.type)
        freed = sum(local_of(p).nbytes for p in self.module.parameters() if p.device.type == "cpu")
        for warning in preflight(self.plan, nvme_paths(config.nvme), freed_nbytes=freed):
            _log.warning("%s", warning)
        if self.plan.gpu_budget_nbytes is not None:
            say(divided_gpu(self.plan, within_gpu_budget(config, hardware).device_nbytes))
        slow = machine.slow_matmul_precisions() if self.device.type == "cpu" else ()
        muon = config.optimizer.ns_dtype if self.plan.products_nbytes[0] else "fp32"
        text = (
            "precision: %s is computed on this CPU without a fast kernel: matrix products can "
            "take 100 times as long as in fp32; use precision: fp32 here"
        )
        for key, precision in (("precision", config.precision), ("optimizer.ns_dtype", muon)):
            if precision in slow:
                _log.warning(text.replace("precision", key), precision)

    def _initialisation(
        self, grouping: ParameterGrouping, dtype: torch.dtype, lazy: LazyWeights,
        only: torch.dtype | None = None,
    ) -> WeightInitialisation:  # fmt: skip
        """Return the sources of values. Meta parameters become real ones, without memory."""
        seed = self.config.seed
        first = WeightInitialisation(self.module, seed, dtype, lazy, grouping.packed)
        make_real(_named(self.module, grouping), dtype, self.device, only)
        return first

    @defer_signals  # an interrupted call would leave its threads running
    def _open_tiers(self, config: OffloadConfig, dtype: torch.dtype) -> None:
        self._tier_manager = TierManager(self.plan, config.nvme, self.device, dtype)

    def _load(self, first: WeightInitialisation) -> None:
        """Fill every group's states, one group at a time."""
        store = self.store
        with progress(first.doing, sum(group.state.nbytes for group in store.groups)) as on_bytes:
            for group in store.groups:
                self._load_group(group, self._values_of(group, first))
                machine.trim_memory()  # a group's values are freed before the next ones come
                on_bytes(group.state.nbytes)
        others = [p for p in self.module.parameters() if store.spec_of(p) is None]
        first.fill_the_rest(others, self.device)
        for group in store.groups:  # modules may have been given their own parameters
            group.writes.note_versions()
        if self.ranks is not None:
            for tensor in (*self.module.buffers(), *others):
                own = local_of(tensor).detach()
                own.copy_(self.ranks.from_first(own))

    @abc.abstractmethod
    def _load_group(
        self, group: ParamGroup, values: Callable[[ParamSpec], torch.Tensor]
    ) -> None: ...

    def _values_of(
        self, group: ParamGroup, first: WeightInitialisation
    ) -> Callable[[ParamSpec], torch.Tensor]:
        """Return a function for a group's first values."""
        params = dict(zip(group.layout.params, group.params, strict=True))
        return first.of(params, self._tensor_parallel)

    def _give_out_values(self) -> None:
        """`state_dict` has values, and conversions ask, until it is closed."""
        self.state_dicts = StateDictHooks(self.module, self.store, self.values)
        self.store.on_close.append(self.state_dicts.remove)
        self.store.on_close.append(Conversions(self.module, self.store).remove)

    def _attach_experts(self) -> None:
        """Let packed experts compute with the rows that groups have, and let `offload.moe` layers
        announce which of their experts come next."""
        store = self.store
        for table in store.tables:
            if table.module is not None:
                from offload.weights import (
                    packed_experts,  # transformers is there: it is its module
                )

                packed_experts.attach(table.module, ExpertAccess(store, table))
                store.on_close.append(partial(packed_experts.detach, table.module))
                continue
            experts = self.module.get_submodule(table.name)
            if isinstance(experts, Experts) and len(experts) == len(table.groups):
                experts.on_chosen = partial(_announce, store, table.groups, experts.first)
                store.on_close.append(partial(setattr, experts, "on_chosen", None))

    def _keep_caches(self, fetcher: Fetcher, *, trains: bool = False) -> None:
        """Keep KV caches in tiers, if the plan has a place for them (see `keep_caches`)."""
        plan, int8 = self.plan, self.config.kv.dtype == "int8"
        if plan.kv is not None:
            self._kv = keep_caches(
                self.module, self.store, self._tier_manager, plan, plan.kv, fetcher, int8=int8,
                trains=trains,
            )  # fmt: skip

    def _close_with(self, owner: object, close: Callable[[], None]) -> None:
        """Call `close()` when `owner` is dropped or the program ends."""
        self._finalizer = weakref.finalize(owner, _close_dropped, os.getpid(), close)

    # ---------------------------------------------------------------- looking
    @contextmanager
    def gathered(self, *what: nn.Parameter | nn.Module | Iterable[nn.Parameter]) -> Iterator[None]:
        """Full parameters inside the block, for reading or writing: of their own shape, where the
        model computes, in the format it computes in.

        `what` are parameters, modules or iterables of parameters; nothing given means all. Written
        parameters keep exactly what was written, and so do their masters. It waits for pending
        updates. Raises TierFullError if the budget cannot hold all of them at once.
        """
        store = self.store
        params = _params_of(what) if what else list(self.module.parameters())
        with self.values.gathered([p for p in params if store.spec_of(p) is not None]):
            yield

    def _seen(self) -> dict[str, Any]:
        """Return the figures that every report has (see `TierTraffic`)."""
        store, kv = self.store, self.plan.kv
        if self._kv is not None:
            self._kv.tidy()
        homes: dict[str, Placement] = {str(c): p for c, p in self.plan.placements.items()}
        if kv is not None:
            homes["kv"] = kv.placement
        with self._tier_manager.lock:
            tiers = tier_reports(self._tier_manager.ledger.accounts)
        for tier in self._tier_manager.away:
            tiers[str(tier)] = replace(tiers[str(tier)], used_nbytes=0, by_class={})
        return {
            "tiers": tiers,
            "bytes_moved": {**self._tier_manager.bytes_moved(), **store.ranks.moved_nbytes()},
            "evictions": self._tier_manager.pool.evictions,
            "memory": self._tier_manager.guard.report(),
            "placements": {name: home.describe() for name, home in homes.items()},
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every tier's books balance."""
        with self._tier_manager.lock:
            self._tier_manager.ledger.check_integrity()

    @property
    def store(self) -> WeightStore:
        """The weights (for checkpoints and tests). Raises StateError once it is closed."""
        self._check_open()
        assert self._store is not None, "made before anything asks for it"
        return self._store

    # ---------------------------------------------------------------- asleep
    @property
    def is_asleep(self) -> bool:
        """Whether `release_device` was called, and `restore_device` not since."""
        return self._store is not None and self._store.one_thread.on_use is not None

    @contextmanager
    def asleep(self, *, host: bool = False, on_use: OnUse = "raise") -> Iterator[None]:
        """Call `release_device` before the block and `restore_device` after it, also after an error
        in it. Within another such block, `host` alone has an effect."""
        was_asleep = self.is_asleep
        try:
            self.release_device(host=host, on_use=on_use)
            yield
        finally:
            if not was_asleep and not self._closed:
                self.restore_device()

    @defer_signals
    def release_device(self, *, host: bool = False, on_use: OnUse = "raise") -> None:
        """Give the device's memory to others between two passes: copies are dropped, and what is at
        home there goes to host memory (parameters, gradients that wait for a step, optimizer
        states, buffers). PyTorch's cache is emptied; the process keeps its context alone.
        `host`: host memory is unpinned and given back, too, and its bytes go to nvme.

        With `device: cpu` both are RAM: copies are dropped, what is at home on the device tier goes
        to nvme if the plan has that, and what is free goes back to the system.

        Until `restore_device` a use of the model or its states is a StateError, or wakes it with
        `on_use="wake"`. `report`, `config`, `plan` and `close` work. It waits for pending updates
        and a save in the background. Of several ranks all call it. Called again, it does what
        `host` adds.

        Raises TierFullError if the next tier has no room, ConfigError if `host` lacks nvme, and
        StateError amid a forward, in `gathered`, or while the program has a view of memory that
        would go; then it stays awake.
        """
        if on_use not in ("raise", "wake"):
            raise ConfigError(f"release_device(on_use={on_use!r}): expected one of raise, wake")
        store = self.store
        with store.one_thread.even_asleep():
            try:
                with self._together("release the device"):
                    store.refuse_amid_use("release_device()")
                    if not self.is_asleep:
                        store.check_usable()
                        store.ranks.finish_pass()
                        self._settle()
                        store.empty()
                with self._together("release the device"):
                    store.ranks.empty()  # of what other ranks have gathered until now
                    self._tier_manager.save(host=host)
            except BaseException:
                self._tier_manager.forget_saved()
                if not self.is_asleep:
                    store.wake()
                raise
            store.one_thread.on_use = _refuse_asleep if on_use == "raise" else self.restore_device
            self._tier_manager.leave()
            params = (p for p in self.module.parameters() if not store.places_of(p))
            own = [each for each in (*self.module.buffers(), *params) if each.device.type != "cpu"]
            self._moved += own
            _move(own, torch.device("cpu"))
        accelerator.empty_cache(self.device)
        machine.trim_memory()

    @defer_signals
    def restore_device(self) -> None:
        """Take the memory again that `release_device` gave back, with the same bits; while awake,
        do nothing. Of several ranks all call it. Raises TierFullError while others use the memory,
        or StorageError; then it stays asleep, and can be called again."""
        store = self.store
        with store.one_thread.even_asleep():
            if not self.is_asleep:
                return
            try:
                with self._together("restore the device"):
                    self._tier_manager.come_back()
            except BaseException:
                self._tier_manager.leave()
                accelerator.empty_cache(self.device)
                raise
            self._tier_manager.forget_saved()
            _move(self._moved, self.device)
            self._moved, store.one_thread.on_use = [], None
            store.wake()

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Let what is inside succeed on all ranks, or raise on all."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        if self.ranks is not None and not isinstance(failure, RankError):
            rows = self.ranks.exchange([int(failure is None)], f"whether all can {what}")
            if failure is None and not rows.all():
                failure = BudgetError(f"another rank cannot {what}: see its error")
        if failure is not None:
            raise failure

    # ---------------------------------------------------------------- weights
    def named_weights(self, *, buffers: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the names and values of `module.state_dict()`, group by group, to
        give to another engine (`load_weights` of vLLM): parameters, under each of their names, and
        then, with `buffers`, buffers.

        Each tensor is a copy on `device` in the format that the model computes in (quantized
        weights dequantized, packed ones `[E, ...]` whole) and stays valid; a caller that keeps none
        has one parameter in memory at a time. The iterator holds nothing between two of them. It
        waits for pending updates. Of several ranks all iterate together. StateError from an
        iterator whose weights were changed since it began.
        """
        self.store.check_usable()
        self.values.adopt_changes()
        return self._weights(buffers, [group.writes.version for group in self.store.groups])

    def _weights(self, buffers: bool, versions: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        store, names, params = self.store, defaultdict[int, list[str]](list), {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            names[id(param)].append(name)
            params[id(param)] = param
        rows = (id(row) for group in store.groups for row in group.params)
        for key in dict.fromkeys([*(store.whole.get(row, row) for row in rows), *params]):
            param = params[key]
            managed = bool(store.places_of(param))
            values = self.values.full(param) if managed else param.detach().clone()
            if versions != [group.writes.version for group in store.groups]:
                raise StateError(
                    "weights were changed while named_weights() was iterated: what came before is "
                    "older than the rest; begin anew, after the step"
                )
            for name in names[key]:
                yield name, values
            del values
        modules = self.module.named_modules(remove_duplicate=False)
        for prefix, module in modules if buffers else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}".lstrip("."), buffer.detach().clone()

    # ---------------------------------------------------------------- ending
    def _check_open(self) -> None:
        if self._closed or self._store is None:
            raise StateError(self._CLOSED.text)
        self._store.one_thread.check_process()

    _CLOSED: Closed  # what is said of it then
    # ... and of a parameter that is given to another one meanwhile
    _TAKEN = (
        "%s trains through another engine that is open: one parameter cannot have two. Close that "
        "one first, which gives the parameters back (offload.engine_of(model).close(keep='host')), "
        "or give offload.initialize one module around all that trains together (and if it was "
        "taken out of a model that has no values any more: make a new parameter)"
    )

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def before_close(self, call: Callable[[], None]) -> None:
        """Call `call()` when it is about to be closed, while it can still be inspected."""
        self._before_close.append(call)

    @defer_signals
    def close(self, keep: Keep | None = None) -> None:
        """Stop threads, close swap files, give back memory, and give the parameters back to the
        model, which is an ordinary one then: the same objects, buffers and hooks of others, all on
        the CPU. Gradients go with the tiers.

        `keep`: "host", tensors in RAM; "drop", no values: a later use of the model is an error that
        says why, until `model.load_state_dict(..., assign=True)` puts other parameters in their
        place. By default "host" where the parameters fit into the RAM that the configuration gave
        to the tiers and into what is free, else, and on several ranks, "drop".

        Raises BudgetError if "host" has no room, and the error of a pending update: it stays open
        then. After an error while parameters come back it is closed, and the model has no values.
        On several ranks all pass the same `keep`. Calling it again does nothing.
        """
        if keep not in (None, "host", "drop"):
            raise ConfigError(f"close(keep={keep!r}): expected one of host, drop")
        if self._closed:
            return
        if self._pid != os.getpid():  # a forked child: it is the parent's
            self._closed = True
            self._forget_finalizer()
            return
        back = self._prepared(keep)
        if self.is_asleep and self._store is not None:  # what is there is dropped as it is
            self._store.refuse_use()
            self._store.one_thread.on_use = None
        with ExitStack() as last_first:  # each one also where another fails
            last_first.callback(self._install)
            last_first.callback(self._close)
            if back is not None:
                last_first.callback(self._take, back)
            calls, self._before_close = self._before_close, []
            for call in calls:
                last_first.callback(call)

    def _prepared(self, keep: Keep | None) -> GivenBack | None:
        """Return the parameters that the model gets back; None to drop them."""
        if keep == "drop" or self._store is None:
            return None
        if keep is None and self.ranks is not None:
            # a rank that ends alone, after an error for instance, cannot gather from the others
            self._why_dropped = (
                "on several ranks all have to ask for the parameters: engine.close(keep='host')"
            )
            return None
        back = GivenBack(self.module, self._store, self.values, self._tier_manager, self._given)
        try:
            self.restore_device()
            with self._store.one_thread:
                self._store.check_usable()
                self._store.refuse_amid_use("close()")
                self._settle()
                self._check_room(back, keep)
        except Exception as error:
            if keep is not None:
                raise
            self._why_dropped = str(error)
            if not isinstance(error, BudgetError | StateError):
                # a pending update failed, with an error of any type: closing is no place to lose it
                _log.warning("the parameters went with the tiers: %s", error)
            return None
        return back

    def _check_room(self, back: GivenBack, keep: Keep | None) -> None:
        """Raise BudgetError, on all ranks, if one has no room for the parameters."""
        with self._together("hold the parameters"):
            refusal = back.refusal(within_budget=keep is None)
            if refusal is not None:
                raise BudgetError(refusal)

    def _take(self, back: GivenBack) -> None:
        try:
            back.take()
        except BaseException as error:
            self._why_dropped = f"giving them back failed: {error!r}"
            raise
        self._back = back

    def _install(self) -> None:
        back, self._back = self._back, None
        if back is not None:
            back.install()

    def _settle(self) -> None:
        """Let values be those of all writes and updates so far."""
        self.values.adopt_changes()

    @property
    def _why_without(self) -> str | None:
        """The error of a use of parameters without values from now on; None if they get them
        back."""
        return None if self._back is not None else self._CLOSED.without_values(self._why_dropped)

    def _close(self) -> None:
        self._closed = True
        self._forget_finalizer()
        with ExitStack() as last_first:
            if self._tensor_parallel is not None:
                last_first.callback(self._tensor_parallel.ranks.watch.close)
            last_first.callback(self._close_all)
            if self._kv is not None:
                last_first.callback(self._kv.close)

    @abc.abstractmethod
    def _close_all(self) -> None:
        """Close threads, files and memory, also if it was not made completely."""

    def _forget_finalizer(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} cannot be copied or pickled: it owns the tiers of its model; "
            "use engine.save_checkpoint()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            self.close()
        except OffloadError as closing:
            if error is None:
                raise
            _log.warning("while closing after an error: %s", closing)


def _close_dropped(pid: int, close: Callable[[], None]) -> None:
    """Close an object that was dropped without `close`, or is open when the program ends.

    The garbage collector runs in any thread, also in those that closing waits for, and while locks
    are held: so a separate thread closes it, and no thread waits for that one. It is not one of
    `threading`, which takes locks, too. A forked child leaves its parent's objects alone.
    """
    if os.getpid() != pid:
        return
    if threading.main_thread().is_alive() or threading.get_ident() != threading.main_thread().ident:
        _thread.start_new_thread(_close_alone, (close,))
    else:  # the program ends, and this is its last thread
        _close_alone(close)


def _close_alone(close: Callable[[], None]) -> None:
    try:
        close()
    except OffloadError as error:
        _log.warning("while closing an engine that was dropped: %s", error)


def _named(model: nn.Module, grouping: ParameterGrouping) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the model's parameters, and the rows of packed ones."""
    yield from model.named_parameters()
    for packed in grouping.packed:
        for number, row in enumerate(packed.rows):
            yield f"{packed.name}[{number}]", row


def _refuse_asleep() -> None:
    raise StateError(
        "the engine is asleep: release_device() gave its memory away; call restore_device(), or "
        "leave the `with engine.asleep():` block first (with on_use='wake' a use does so itself)"
    )


@torch.inference_mode(False)
@torch.no_grad()
def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Let tensors have their values on `device`, as `nn.Module.to` does."""
    for tensor in tensors:
        memory = memory_of(tensor)
        hold(tensor, tensor.data.to(device)) if memory is None else hold(tensor, memory.to(device))


def _announce(
    store: WeightStore, groups: Sequence[ParamGroup], first: int, chosen: Sequence[int]
) -> None:
    """Begin to bring experts, by their numbers; `first` is that of the first group's."""
    store.announce([groups[number - first] for number in chosen])


def _check_model(model: nn.Module) -> None:
    refuse_wrapped(model)
    refuse_uninitialised(model)
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype.itemsize == 1:  # as managed, it would be cast
            raise UnsupportedError(
                f"{name} is {param.dtype}: the engine has all parameters in its precision:, where "
                "quantized weights lose their scales; dequantize the model first (transformers: "
                "FineGrainedFP8Config(dequantize=True))"
            )
        if param.is_inference():
            raise UnsupportedError(
                f"{name} was made in inference mode, and counts no changes; build the model "
                "outside of torch.inference_mode()"
            )
    refuse_shared_views(model)


def refuse_shared(model: nn.Module) -> None:
    """Raise StateError if a parameter of this model is in other tiers, also in closed ones."""
    for prefix, module in model.named_modules():
        owner = UnitHooks.owner_of(module)
        taken = owner is not None
        for name, param in module.named_parameters(prefix=prefix, recurse=taken):
            if why_closed(param) is not None:
                raise StateError(
                    "this model was in tiers before, which were closed, and its parameters are "
                    'gone; build it anew (engine.close(keep="host") would have kept them)'
                )
            if taken or is_trained_here(param):
                kind = type(owner) if isinstance(owner, TieredModel) else TieredModel
                raise StateError(kind._TAKEN % name)


def _params_of(what: Iterable[Any]) -> list[nn.Parameter]:
    params: list[nn.Parameter] = []
    for item in what:
        if isinstance(item, nn.Module):
            params.extend(item.parameters())
        elif isinstance(item, torch.Tensor):
            params.append(cast(nn.Parameter, item))
        else:
            params.extend(item)
    return list({id(param): param for param in params}.values())
