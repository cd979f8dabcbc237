"""How often an expert must be fetched: our order of eviction beside LRU, LFU and Belady's.

    python -m benchmarks.expert_residency [--resident 0.25 0.1] [--routings FILE] [--out FILE]
    python -m benchmarks.expert_residency --record FILE   # trains a model, records its routings

Routings of a trained model, and made ones, are replayed without bytes over the runtime's own
fetcher and slots, where memory holds a part of all experts. A need is one expert of one layer in
one pass, forward or backward; a hit is a need without a fetch. Also measured: what it would bring
to guess what a router will choose, and to fetch that before it has spoken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.swap.io_backend import Priority
from offload.swap.slot_pool import SlotPool
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import Tier
from offload.zero.fetching import Fetcher

RECORDS = Path(__file__).parent / "records"
DOCS = Path(__file__).parents[1] / "docs"  # the text that the recorded model is trained on
LAYERS, EXPERTS, CHOSEN = 6, 64, 2
TRAINED_STEPS, BATCH, STEPS, TOKENS, DECODED = 300, 8, 96, 64, 384
SETTLING = 16  # passes that are not counted
DEPTH = 4  # items fetched ahead

Pass = list[list[int]]  # by layer: the experts that tokens go to, in ascending order


@dataclass(frozen=True)
class Routings:
    """The passes of one run, one after the other."""

    name: str
    trains: bool  # each forward is followed by a backward, which needs its experts again
    passes: list[Pass]

    def needs(self) -> Iterator[tuple[int, int]]:
        """Layer and expert, in the order of use."""
        for chosen in self.passes:
            forward = [(layer, expert) for layer, some in enumerate(chosen) for expert in some]
            yield from forward
            if self.trains:
                yield from reversed(forward)


@dataclass(frozen=True)
class Guesses:
    """Of a layer's experts that are not in memory, the likeliest `most` that at least a share of
    the last passes chose."""

    name: str
    most: int = EXPERTS
    least_share: float = 0.0


# ---------------------------------------------------------------- states without bytes
class _Resident:
    """The state of what always stays in memory."""

    in_place = True

    def bring(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        return True

    def note_use(self) -> None:
        """Nothing moves."""


class _Copy:
    """The state of an expert at home in a file: as `FileState`, but reads take no time."""

    in_place = False
    held_nbytes = PAGE_NBYTES

    def __init__(self, name: str, pool: SlotPool, next_use: Callable[[], float]) -> None:
        self.name = name
        self.next_use = next_use
        self.in_use = False
        self.fetches = 0
        self._pool = pool
        self._slot: Lease | None = None

    @property
    def is_held(self) -> bool:
        return self._slot is not None

    def can_drop(self) -> bool:
        return not self.in_use

    def drop(self) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None, "a copy is held"
        self._pool.unregister(self)
        slot.free()

    def leave(self) -> None:
        """It never changes."""

    def transit(self) -> Callable[[], None] | None:
        return None

    def note_use(self) -> None:
        """The replay counts."""

    def bring(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        if self.is_held:
            return True
        size, kind = PAGE_NBYTES, StateClass.PARAMETERS
        if next_use is None:
            slot: Lease | None = self._pool.demand(size, self.name, kind)
        else:
            slot = self._pool.offer(size, self.name, kind, next_use=next_use)
        if slot is None:
            return False
        self._slot = slot
        self._pool.register(self)
        self.fetches += 1
        return True


@dataclass(eq=False)
class _Item:
    index: int
    state: Any


# ---------------------------------------------------------------- replays
class Replay:
    """One run, where memory holds `slots` experts. As the runtime does it; a subclass has another
    order of eviction."""

    name = "offload"
    prefetch = DEPTH

    def __init__(self, routings: Routings, slots: int, guesses: Guesses | None = None) -> None:
        """`guesses`: experts that are fetched before the router of their layer has spoken."""
        self.routings = routings
        self.layers = len(routings.passes[0])
        self.fetcher = Fetcher(self.prefetch)
        size = slots * PAGE_NBYTES
        tier = MemoryTier(Tier.HOST, size, HostMemory(size), Ledger())
        self.pool = SlotPool(tier, threading.RLock())
        self.blocks = [self._add(_Resident(), "") for _ in range(self.layers)]
        self.experts = [
            [self._expert(layer, expert) for expert in range(EXPERTS)]
            for layer in range(self.layers)
        ]
        self._guesses = guesses
        self.now = 0  # needs so far
        self.coming: set[int] = set()  # of the layer being computed, and not used yet
        self.late = 0  # fetched when the router had spoken, or later
        self.guessed = self.guessed_right = 0

    def _add(self, state: Any, table: str) -> _Item:
        item = _Item(self.fetcher.next_number, state)
        self.fetcher.add(item, table)
        return item

    def _expert(self, layer: int, expert: int) -> _Item:
        index = self.fetcher.next_number
        state = _Copy(f"{layer}.{expert}", self.pool, lambda: self.next_use(index))
        return self._add(state, f"layer {layer}")

    def next_use(self, index: int) -> float:
        """What the slots ask."""
        return self.fetcher.next_use(index)

    @property
    def fetches(self) -> int:
        return sum(item.state.fetches for layer in self.experts for item in layer)

    def run(self) -> Figures:
        needs = fetches = 0
        for number, chosen in enumerate(self.routings.passes):
            if number == SETTLING:
                needs, fetches = self.now, self.fetches
                self.late = self.guessed = self.guessed_right = 0
            self._pass(chosen)
        return Figures(
            self.now - needs, self.fetches - fetches, self.late, self.guessed, self.guessed_right
        )

    def _pass(self, chosen: Pass) -> None:
        self.fetcher.begin_forward()
        for layer, experts in enumerate(chosen):
            self._block(layer, backward=False)
            items = [self.experts[layer][expert] for expert in experts]
            guessed = self._guess(layer)
            self.coming = {item.index for item in items}
            self.guessed_right += sum(item in items for item in guessed)
            before = self.fetches
            self.fetcher.announce(items)
            self._use(items, backward=False)
            self.late += self.fetches - before
        if self.routings.trains:
            for layer in reversed(range(self.layers)):
                self._block(layer, backward=True)
                items = [self.experts[layer][expert] for expert in reversed(chosen[layer])]
                self._use(items, backward=True)
            self.fetcher.trace.end_cycle()

    def _block(self, layer: int, *, backward: bool) -> None:
        self.fetcher.need(self.blocks[layer], backward=backward)
        self.fetcher.fetch_ahead()

    def _use(self, items: Sequence[_Item], *, backward: bool) -> None:
        self.coming = {item.index for item in items}
        for item in items:
            item.state.in_use = True
            self.fetcher.need(item, backward=backward)
            item.state.bring(next_use=None)
            self.fetcher.fetch_ahead()
            item.state.in_use = False
            self.coming.discard(item.index)
            self.now += 1
            self.used(item.index)

    def used(self, index: int) -> None:
        """For orders that count."""

    def _guess(self, layer: int) -> list[_Item]:
        """Begin to fetch the likeliest experts of a layer that are not there."""
        if self._guesses is None:
            return []
        absent = [item for item in self.experts[layer] if not item.state.is_held]
        uses = {item: self.fetcher.next_use(item.index) for item in absent}
        # the layer's place is the next one: half a use away, over the share (see Trace)
        likely = [item for item in absent if 0.5 / uses[item] >= self._guesses.least_share]
        likely.sort(key=lambda item: uses[item])
        guessed = likely[: self._guesses.most]
        there = [item for item in guessed if item.state.bring(next_use=uses[item])]
        self.guessed += len(there)
        return there


class _Without(Replay):
    """Fetches on demand, by an order that knows no more than what the layer being computed uses."""

    prefetch = 0

    def next_use(self, index: int) -> float:
        return -1.0 if index in self.coming else self.order(index)

    def order(self, index: int) -> float:
        """At least 0; the largest is given up first."""
        raise NotImplementedError


class LeastRecent(_Without):
    name = "LRU"

    def __init__(self, routings: Routings, slots: int) -> None:
        super().__init__(routings, slots)
        self._last: dict[int, int] = {}

    def order(self, index: int) -> float:
        return self.now - self._last.get(index, 0)

    def used(self, index: int) -> None:
        self._last[index] = self.now


class LeastFrequent(_Without):
    name = "LFU"

    def __init__(self, routings: Routings, slots: int) -> None:
        super().__init__(routings, slots)
        self._uses: dict[int, int] = {}

    def order(self, index: int) -> float:
        return 1 / (1 + self._uses.get(index, 0))

    def used(self, index: int) -> None:
        self._uses[index] = self._uses.get(index, 0) + 1


class Belady(_Without):
    """Knows all that is to come."""

    name = "Belady"

    def __init__(self, routings: Routings, slots: int) -> None:
        super().__init__(routings, slots)
        self._needs: dict[int, list[int]] = {}
        for when, (layer, expert) in enumerate(routings.needs()):
            self._needs.setdefault(self.experts[layer][expert].index, []).append(when)

    def order(self, index: int) -> float:
        needs = self._needs.get(index, [])
        place = bisect_left(needs, self.now)
        return needs[place] - self.now if place < len(needs) else float("inf")


@dataclass(frozen=True)
class Figures:
    """Of the passes that count."""

    needs: int
    fetches: int
    late: int
    guessed: int
    guessed_right: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.fetches / self.needs


# ---------------------------------------------------------------- routings
def made_routings(tokens: int, steps: int, seed: int = 0) -> Routings:
    """Popularity after Zipf's law (1/rank), in which some experts change places at each step."""
    chance = random.Random(seed)
    ranked = [chance.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
    weights = [1 / rank for rank in range(1, EXPERTS + 1)]
    passes = []
    for _ in range(steps):
        for ranks in ranked:
            a, b = chance.sample(range(EXPERTS), 2)
            ranks[a], ranks[b] = ranks[b], ranks[a]
        drawn = [set(chance.choices(ranks, weights, k=tokens)) for ranks in ranked]
        passes.append([sorted(experts) for experts in drawn])
    return Routings(f"Zipf with drift, training, {tokens} choices", True, passes)


def read_routings(path: Path) -> list[Routings]:
    """What `record` wrote."""
    found = json.loads(path.read_text())
    return [
        Routings(
            run["name"], run["trains"],
            [[_unmasked(mask) for mask in chosen.split()] for chosen in run["passes"]],
        )
        for run in found["runs"]
    ]  # fmt: skip


def _masked(experts: Sequence[int]) -> str:
    return f"{sum(1 << expert for expert in set(experts)):x}"


def _unmasked(mask: str) -> list[int]:
    bits = int(mask, 16)
    return [expert for expert in range(EXPERTS) if bits >> expert & 1]


def record(path: Path) -> None:
    """Train a small Qwen3-MoE, in plain PyTorch and transformers, on the bytes of docs/*.md, and
    write which experts its tokens then go to: as training goes on, and token by token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    text = b"".join(file.read_bytes() for file in sorted(DOCS.glob("*.md")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=32,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True,
        router_aux_loss_coef=0.01, output_router_logits=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    routed: list[torch.Tensor] = []  # of one pass, by layer: [T, K]
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.register_forward_pre_hook(lambda _, args: routed.append(args[1]))

    def step(rows: torch.Tensor) -> float:
        routed.clear()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    for number in range(TRAINED_STEPS):
        starts = torch.randint(len(tokens) - TOKENS, (BATCH,)).tolist()
        loss = step(torch.stack([tokens[start : start + TOKENS] for start in starts]))
        if number % 50 == 0:
            print(f"step {number}: loss {loss:.3f}", flush=True)
    training = []
    for number in range(STEPS):
        step(tokens[number * TOKENS : (number + 1) * TOKENS][None])
        training.append(" ".join(_masked(layer.flatten().tolist()) for layer in routed))
    routed.clear()
    with torch.no_grad():
        model(input_ids=tokens[-DECODED:][None])
    decoding = [
        " ".join(_masked(layer[position].tolist()) for layer in routed)
        for position in range(DECODED)
    ]
    runs = [
        {"name": f"Qwen3-MoE, training, {TOKENS} tokens", "trains": True, "passes": training},
        {"name": "Qwen3-MoE, token by token", "trains": False, "passes": decoding},
    ]
    about = f"{LAYERS} layers of {EXPERTS} experts, {CHOSEN} per token: hex masks by pass and layer"
    path.write_text(json.dumps({"about": about, "runs": runs}, indent=0) + "\n")


# ---------------------------------------------------------------- the record
ORDERS: Sequence[type[Replay]] = (Belady, Replay, LeastFrequent, LeastRecent)
GUESSES = (
    None,
    Guesses("chosen by 95 % of the last passes", least_share=0.95),
    Guesses("by 50 %", least_share=0.5),
    Guesses("the likeliest one of a layer", most=1),
    Guesses("the likeliest four", most=4),
)
HEAD = f"""# Residency of experts

{LAYERS} layers of {EXPERTS} experts, {CHOSEN} per token. The first {SETTLING} passes are not
counted. *Hits* are needs, in forward or backward, without a fetch. *In vain*: guessed, and not
chosen then. *The forward waits for*: fetches that begin when the router has spoken, of which the
runtime still hides what its other experts compute meanwhile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="train, and write routings there")
    parser.add_argument("--routings", type=Path, default=RECORDS / "expert-routings.json")
    parser.add_argument(
        "--resident", type=float, nargs="+", default=[0.25, 0.1], help="shares of all experts"
    )
    parser.add_argument("--out", type=Path, help="write the record there")
    arguments = parser.parse_args()
    if arguments.record is not None:
        record(arguments.record)
        return
    made = [made_routings(64, STEPS), made_routings(512, STEPS // 2)]
    runs = [*read_routings(arguments.routings), *made]
    lines = [HEAD]
    for run, share in itertools.product(runs, arguments.resident):
        lines += _section(run, round(share * LAYERS * EXPERTS))
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text)


def _section(run: Routings, slots: int) -> Iterator[str]:
    figures = {order.name: order(run, slots).run() for order in ORDERS}
    best = figures[Belady.name]
    used = sum(map(len, itertools.chain.from_iterable(run.passes))) / LAYERS / len(run.passes)
    yield f"\n## {run.name}: memory holds {slots} of {LAYERS * EXPERTS} experts"
    yield f"{len(run.passes)} passes, {used:.1f} experts per layer and pass"
    yield "\n| order of eviction | hits | fetches per pass | of Belady's |"
    yield "| --- | ---: | ---: | ---: |"
    passes = len(run.passes) - SETTLING
    for name, each in figures.items():
        yield (
            f"| {name} | {each.hit_rate:.1%} | {each.fetches / passes:.1f} | "
            f"{each.fetches / best.fetches:.2f} x |"
        )
    yield (
        "\n| guessed ahead | fetches per pass | guessed | of these in vain | "
        "the forward waits for |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for guesses in GUESSES:
        each = Replay(run, slots, guesses).run()
        vain = 1 - each.guessed_right / each.guessed if each.guessed else 0.0
        yield (
            f"| {guesses.name if guesses else 'none'} | {each.fetches / passes:.1f} | "
            f"{each.guessed / passes:.1f} | {vain:.0%} | {each.late / passes:.1f} |"
        )


if __name__ == "__main__":
    main()
