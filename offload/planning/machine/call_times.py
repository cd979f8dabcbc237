"""Times a small model, plain and from a weight store: the cost of the calls in passes without
gradients, beside work and motion.

    plain                 operations
    weights in memory     and uses of groups: hooks, the trace, what is next
    weights in 4 bits     and products straight from codes, each found, unpacked and called
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from offload.config import OffloadConfig
from offload.gpt import LanguageModel, build_meta_model
from offload.kernels.floats import Float
from offload.planning.activations.trace import trace_forward
from offload.planning.machine.sample_models import config_of, made
from offload.planning.plan.workload import Workload
from offload.swap.states.coded_state import CodedState
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import MemoryState, State
from offload.tiers import accelerator
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import Tier
from offload.zero.groups.coded_layout import lay_out_codes
from offload.zero.groups.discovery import Discovery, discover
from offload.zero.groups.layout import ParamSpec, lay_out
from offload.zero.groups.store import WeightStore
from offload.zero.groups.weight_codes import WeightCodes
from offload.zero.groups.weight_values import WeightValues

_LAYERS = 4
_SAMPLE = (_LAYERS, 64, 128, 2, 1, 1)  # too small for anything but calls
_REPEAT, _MOST_REPEAT_S = 40, 0.2
_HOST_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of one call while nothing else runs."""

    operation_s: float  # of a kernel
    use_s: float = 0.0  # of a group in memory
    coded_s: float = 0.0  # of a product straight from codes


def measure_calls(device: torch.device) -> CallTimes:
    """Measure call times; on an accelerator only operations, since calls are queued ahead there."""
    config = config_of("fp32", _SAMPLE, device, storage={"weights": "int4"})
    meta = build_meta_model(config).requires_grad_(False)
    operations = trace_forward(meta, config, Workload(1, 1)).forward.operations
    plain_s = _pass_s(made(config, device).eval(), device)
    if accelerator.is_accelerator(device):
        return CallTimes(plain_s / operations)
    raw_s, uses, _ = _stored_s(config, device, coded=False)
    coded_s, _, products = _stored_s(config, device, coded=True)
    return CallTimes(
        plain_s / operations,
        max(0.0, raw_s - plain_s) / uses,
        max(0.0, coded_s - raw_s) / products,
    )


def _stored_s(
    config: OffloadConfig, device: torch.device, *, coded: bool
) -> tuple[float, int, int]:
    """Seconds of a pass from a store in memory, its uses of groups, and its matrices in codes."""
    model = made(config, device).eval().requires_grad_(False)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}

    def value(spec: ParamSpec) -> torch.Tensor:
        return values[spec.name]

    found = discover(model).stored(config.stored if coded else None)
    with ExitStack() as stack:
        homes = _Homes(found, stack)
        store = WeightStore(found, homes, torch.float32, device, straight_from_codes=True)
        stack.callback(store.close)
        for group in store.groups:
            store.load(group, value)
        store.start(model, WeightValues(store), lambda: store)
        took_s = _pass_s(model, device)
    uses = sum(len(unit.groups) for unit in found.units)
    shapes = [shape for group in found.groups for shape in group.shape.params]
    return took_s, uses, sum(shape.stored is not None for shape in shapes)


def _pass_s(model: LanguageModel, device: torch.device) -> float:
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)  # BS
    times: list[float] = []
    while len(times) < 3 or (len(times) <= _REPEAT and sum(times) < _MOST_REPEAT_S):
        started = time.perf_counter()
        with torch.inference_mode():
            model(token)
        accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[2:])


class _Homes:
    """Holds weights in host memory, as they are or in codes."""

    def __init__(self, found: Discovery, stack: ExitStack) -> None:
        """`stack` closes the states that are made."""
        memory = HostMemory(_HOST_NBYTES)
        tier = MemoryTier(Tier.HOST, _HOST_NBYTES, memory, Ledger())
        self._pool = SlotPool(tier, threading.RLock())
        self._layouts = [lay_out(group.shape.params) for group in found.groups]
        self._stack = stack

    def parameters(
        self, index: int, name: str, numel: int, next_use: Callable[[], float], edge: int,
        stride: int | None = None,
    ) -> State:  # fmt: skip
        def home(nbytes: int, piece_nbytes: int) -> State:
            lease = self._pool.demand(nbytes, name, StateClass.PARAMETERS)
            return MemoryState(name, nbytes, piece_nbytes, lease)

        nbytes, layout = 4 * numel, self._layouts[index]
        made: State = home(nbytes, nbytes) if not layout.is_stored else CodedState(
            nbytes, nbytes, WeightCodes(lay_out_codes(layout, 4), Float.FP32), home, self._pool,
            next_use,
        )  # fmt: skip
        self._stack.callback(made.close)
        return made
