"""Weights alone in their tiers: a model computes from them, and nothing of a trainer is there."""

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload.errors import StateError
from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.quantized_state import QuantizedState
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import Quantizer, State
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import PAGE_NBYTES, Tier
from offload.tiers.units import round_up
from offload.zero.groups.layout import ParamSpec
from offload.zero.groups.parameter_grouping import group_parameters
from offload.zero.groups.store import NextUse, WeightStore
from offload.zero.groups.weight_values import WeightValues
from tests.offload.engine_cases import LENGTH, VOCABULARY, TinyLM, seeded
from tests.swap.test_quantized_state import Nibbles

TRAINER = [
    "block_state", "chunks", "deferred_updates", "device_update", "gradient_handles",
    "gradient_hooks", "gradient_paths", "gradients", "optimizer_state", "rank_work", "records",
    "recompute", "reduction", "runtime", "stepper", "update", "values",
]  # fmt: skip


@dataclass
class Homes:
    """States in files, with `slots_nbytes` of memory for copies, or in memory."""

    files: BlockStore
    pool: SlotPool
    in_files: bool
    quantizer: Quantizer | None = None  # how weights are stored; None: as they are
    states: list[State] = field(default_factory=list)

    def parameters(
        self, index: int, name: str, numel: int, next_use: NextUse, trainable: int,
        stride: int | None = None,
    ) -> State:  # fmt: skip
        return self.state(name, 4 * numel, next_use)

    def state(self, name: str, nbytes: int, next_use: NextUse) -> State:
        def home(nbytes: int) -> State:
            if self.in_files:
                slot = Slot(name, nbytes, StateClass.PARAMETERS, self.pool, next_use)
                return CachedFileState(self.files, slot, PAGE_NBYTES)
            lease = self.pool.demand(nbytes, name, StateClass.PARAMETERS)
            return MemoryState(name, nbytes, PAGE_NBYTES, lease)

        if self.quantizer is None:
            made = home(nbytes)
        else:
            slot = Slot(name, nbytes, StateClass.PARAMETERS, self.pool, next_use)
            made = QuantizedState(home(self.quantizer.stored_nbytes(nbytes)), self.quantizer, slot)
        self.states.append(made)
        return made


@pytest.fixture
def make_homes(tmp_path: Path) -> Iterator[Callable[..., Homes]]:
    made: list[Homes] = []

    def make(slots_nbytes: int, *, in_files: bool, quantizer: Quantizer | None = None) -> Homes:
        lock, ledger = threading.RLock(), Ledger()
        host = MemoryTier(Tier.HOST, slots_nbytes, HostMemory(slots_nbytes), ledger)
        tier = FileTier(64 << 20, [1.0], ledger)
        files = BlockStore([SwapFile(tmp_path)], tier, ThreadsBackend(), lock=lock)
        made.append(Homes(files, SlotPool(host, lock), in_files, quantizer))
        return made[-1]

    yield make
    for homes in made:
        for state in homes.states:
            state.close()
        homes.files.close()


def stored(model: nn.Module, homes: Homes, prefetch: int = 1) -> WeightStore:
    """`model` computes with a store of its own values."""
    values = {name: param.detach().clone() for name, param in model.named_parameters()}

    def value(spec: ParamSpec) -> Tensor:
        return values[spec.name]

    store = WeightStore(
        group_parameters(model), homes, torch.float32, torch.device("cpu"), prefetch=prefetch
    )
    for group in store.groups:
        store.load(group, value)
    store.start(model, WeightValues(store), store)
    return store


def generate(model: nn.Module, count: int = 4) -> tuple[Tensor, list[Tensor]]:
    """Greedy decoding over a window of the last tokens: tokens, and all logits on the way."""
    tokens, seen = torch.arange(LENGTH).remainder(VOCABULARY)[None], []
    with torch.no_grad():
        for _ in range(count):
            logits = model(tokens[:, -LENGTH:])
            seen.append(logits)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens, seen


def assert_generates_alike(model: nn.Module, plain: nn.Module, count: int = 4) -> None:
    (tokens, logits), (expected_tokens, expected) = (generate(m, count) for m in (model, plain))
    assert tokens.tolist() == expected_tokens.tolist()
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


def largest(model: nn.Module) -> int:
    """Bytes of the slot of the largest group."""
    homes = _Counter()
    WeightStore(group_parameters(copy.deepcopy(model)), homes, torch.float32, torch.device("cpu"))
    return max(round_up(nbytes, PAGE_NBYTES) for nbytes in homes.sizes)


class _Counter:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def parameters(
        self, index: int, name: str, numel: int, next_use: NextUse, trainable: int,
        stride: int | None = None,
    ) -> State:  # fmt: skip
        self.sizes.append(4 * numel)
        lease = MemoryTier(Tier.HOST, 4 << 20, HostMemory(4 << 20), Ledger()).lease(
            4 * numel, owner=name, state_class=StateClass.PARAMETERS
        )
        return MemoryState(name, 4 * numel, PAGE_NBYTES, lease)


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_a_model_generates_from_the_store_alone_with_the_same_bits(
    in_files: bool, make_homes: Callable[..., Homes]
) -> None:
    plain = seeded(lambda: TinyLM(4))
    model = copy.deepcopy(plain)
    slots = 2 * largest(plain) if in_files else 64 << 20
    homes = make_homes(slots, in_files=in_files)
    store = stored(model, homes)
    assert_generates_alike(model, plain)
    if in_files:  # the groups that do not fit were given up, and fetched again
        assert homes.pool.evictions > 0
        assert all(not group.is_gathered for group in store.groups)
    store.close()


@pytest.mark.slow
def test_the_store_imports_nothing_of_a_trainer() -> None:
    code = (
        "import sys, offload.zero.groups.store, offload.zero.groups.weight_values;"
        "print(*sorted(name.rpartition('.')[2] for name in sys.modules"
        " if name.startswith('offload.zero.')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    there = ended.stdout.split()
    assert "store" in there
    assert not set(there) & set(TRAINER)


def test_what_is_written_to_a_parameter_is_what_the_model_computes_with(
    make_homes: Callable[..., Homes],
) -> None:
    plain = seeded(lambda: TinyLM(4))
    model = copy.deepcopy(plain)
    homes = make_homes(3 * largest(plain), in_files=True)
    store = stored(model, homes)
    generate(model, 1)
    with torch.no_grad():
        for each in (plain, model):
            each.blocks[2].mlp[0].weight.mul_(0.5)  # released: written through to its home
    assert torch.equal(
        model.blocks[2].mlp[0].weight.detach().clone(), plain.blocks[2].mlp[0].weight
    )
    assert_generates_alike(model, plain)
    store.close()


def test_a_closed_store_refuses_calls(make_homes: Callable[..., Homes]) -> None:
    model = seeded(lambda: TinyLM(2))
    store = stored(model, make_homes(64 << 20, in_files=False))
    store.close()
    with pytest.raises(StateError, match="closed"):
        generate(model)


# ---------------------------------------------------------------- stored in fewer bytes
@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_the_same_stored_bytes_give_the_same_bits_wherever_they_are(
    in_files: bool, make_homes: Callable[..., Homes]
) -> None:
    plain = seeded(lambda: TinyLM(4))
    model = copy.deepcopy(plain)
    quantizer = Nibbles()
    homes = make_homes(3 * largest(plain), in_files=in_files, quantizer=quantizer)
    store = stored(model, homes)
    for group in store.groups:  # what is stored
        flat = torch.zeros(group.layout.numel)
        names = dict(plain.named_parameters())
        for spec in group.layout.params:
            flat[spec.offset : spec.stop] = names[spec.name].detach().reshape(-1)
        said = torch.empty(quantizer.stored_nbytes(flat.nbytes), dtype=torch.uint8)
        quantizer.quantize(flat.view(torch.uint8), said)
        quantizer.dequantize(said, flat.view(torch.uint8))
        with torch.no_grad():
            for spec in group.layout.params:
                names[spec.name].copy_(flat[spec.offset : spec.stop].view(spec.shape))
    assert_generates_alike(model, plain)
    assert homes.pool.evictions > 0
    store.close()
