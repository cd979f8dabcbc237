"""Placements worth laying out: every split on a grid, then finer around the best.

A split of one class is a row of shares over (device, host, nvme). All combinations of the classes'
splits are judged at once by `rough_step` and by the memory that they need; what the configuration
names has a single row. Deterministic: ties go to the placement with fewer splits, then to that in
faster tiers, then to the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from offload.planning.activation_plan import least_window
from offload.planning.estimate import short_weights
from offload.planning.plan_builder import PlanBuilder
from offload.planning.plan_sizes import CLASSES, STAGING_BUFFERS, records_in, staging_nbytes_of
from offload.planning.rough_step import DEVICE, HOST, NVME, Floats, StepWork, rough_seconds
from offload.planning.speeds import Speeds
from offload.planning.splits import (
    TIERS,
    Shares,
    compositions,
    pairs,
    placement_of,
    row_of,
    shares_of,
    shifted,
)
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement

Numbers = npt.NDArray[np.int64]

# Combinations that are judged at a time: some megabytes of arrays, some milliseconds.
_MOST_COMBINATIONS = 20_000
# Pieces up to this number are dealt out for every split; of more, shares of the sum are as good.
_FEW_PIECES = 2_000
_FINEST = 0.01


@dataclass(frozen=True)
class Open:
    """Tiers that a search may use, and memory that others need."""

    tiers: Mapping[StateClass, tuple[TierName, ...]]  # of classes that are not named
    elsewhere_nbytes: int = 0  # of RAM, beside tiers: activations, libraries
    on_device_nbytes: int = 0  # of GPU memory, likewise


@dataclass(frozen=True)
class Found:
    """A placement, how long its step takes roughly, and by how much it does not fit."""

    shares: tuple[Shares, ...]  # one row per class, in the order of CLASSES
    seconds: float
    short: int  # missing bytes, weighed

    @property
    def placements(self) -> dict[StateClass, Placement]:
        return {c: placement_of(row) for c, row in zip(CLASSES, self.shares, strict=True)}


class PlacementSearch:
    """Of one model, one configuration and one machine."""

    def __init__(self, builder: PlanBuilder, room: Open, work: StepWork, speeds: Speeds) -> None:
        self._builder = builder
        self._room = room
        self._work = work
        self._speeds = speeds

    def best(self, count: int) -> list[Found]:
        """At most `count` placements, the best first: what fits by seconds, then what is least
        short. Each uses other tiers than those before it: a per cent more or less is no choice."""
        step = self._coarsest_step()
        found = self._judge([self._splits(c, step) for c in CLASSES], count)
        while step > _FINEST:
            finer = max(_FINEST, step / 5)
            around = [self._judge(self._near(each, step, finer), count) for each in found[:3]]
            found = _merged([found, *around], count)
            step = finer
        return found

    def corners(self, count: int) -> list[Found]:
        """At most `count` placements with every open class whole in one tier: what somebody would
        try by hand."""
        return self._judge([self._splits(c, 1.0) for c in CLASSES], count)

    # ---------------------------------------------------------------- splits
    def _coarsest_step(self) -> float:
        for parts in (20, 10, 5, 4):
            numbers = [len(compositions(parts, len(t))) for t in self._room.tiers.values()]
            if np.prod(numbers or [1]) <= _MOST_COMBINATIONS:
                return 1 / parts
        return 0.5

    def _splits(self, state_class: StateClass, step: float) -> list[Shares]:
        tiers = self._room.tiers.get(state_class)
        if tiers is None:
            return [shares_of(self._fixed(state_class))]
        rows = compositions(round(1 / step), len(tiers))
        return [row_of(tiers, [part * step for part in row]) for row in rows]

    def _fixed(self, state_class: StateClass) -> Placement:
        return self._builder.explicit.get(state_class, Placement.on(TierName.HOST))

    def _near(self, found: Found, step: float, finer: float) -> list[list[Shares]]:
        """Splits between those of the grid around what was found."""
        rows = []
        for state_class, centre in zip(CLASSES, found.shares, strict=True):
            tiers = self._room.tiers.get(state_class)
            if tiers is None:
                rows.append([centre])
                continue
            moves = [
                round(k * finer, 6) for k in range(-round(step / finer), round(step / finer) + 1)
            ]
            moved = {shifted(centre, a, b, move) for a, b in pairs(tiers) for move in moves}
            rows.append(sorted(row for row in moved | {centre} if row is not None))
        return _limited(rows)

    # ---------------------------------------------------------------- judging
    def _judge(self, splits: Sequence[Sequence[Shares]], count: int) -> list[Found]:
        held = [self._held(c, rows) for c, rows in zip(CLASSES, splits, strict=True)]
        grid = np.indices([len(rows) for rows in splits]).reshape(len(CLASSES), -1)
        by_class = {c: held[i][grid[i]] for i, c in enumerate(CLASSES)}
        needed, short = self._needed(by_class)
        budgets = self._builder.budgets
        seconds = rough_seconds(
            by_class, budgets[TierName.HOST] - needed[HOST],
            np.minimum(budgets[TierName.DEVICE], self._device_room) - needed[DEVICE],
            self._work, self._speeds,
        )  # fmt: skip
        parts = sum((by_class[c] > 0).sum(axis=1) for c in CLASSES)
        depth = sum(by_class[c] @ np.array([0, 1, 2]) for c in CLASSES)
        order = np.lexsort((depth, parts, _rounded(seconds), short))
        kinds = np.zeros(len(order), dtype=np.int64)
        for state_class in CLASSES:
            kinds = kinds * 8 + _used(by_class[state_class])
        order = _first_of_each(kinds, order)
        return [
            Found(
                tuple(splits[i][grid[i][n]] for i in range(len(CLASSES))),
                float(seconds[n]), int(short[n]),
            )
            for n in order[:count]
        ]  # fmt: skip

    @cached_property
    def _device_room(self) -> float:
        hardware = self._builder.hardware
        if not self._builder.gpu:
            return float("inf")
        return float(hardware.device_nbytes - self._room.on_device_nbytes)

    def _held(self, state_class: StateClass, rows: Sequence[Shares]) -> Floats:
        """Bytes per split and tier (N x 3)."""
        groups = self._builder.groups
        if state_class is not StateClass.OPTIMIZER:
            pieces = tuple(getattr(group, state_class) for group in groups)
            held = _dealt(rows, pieces, (pieces,) * len(TIERS))
            if state_class is StateClass.GRADIENTS:
                held = self._sums_on_host(held, rows)
            return held
        if len(self._record_sizes) <= _FEW_PIECES:
            return _dealt(rows, tuple(self._record_sizes), self._records_in)
        whole: Floats = np.array(rows) * self._records_total
        # dealing out may differ
        split_here = (np.count_nonzero(whole, axis=1) > 1) & (whole[:, HOST] > 0)
        whole[split_here, HOST] += self._largest_record
        return whole

    @cached_property
    def _records_in(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of every record in the format of each tier."""
        groups, sizes = self._builder.groups, self._builder.sizes
        return tuple(
            tuple(nbytes for group in groups for nbytes in records_in(group, tier, sizes))
            for tier in TIERS
        )

    @cached_property
    def _records_total(self) -> Floats:
        groups, sizes = self._builder.groups, self._builder.sizes
        totals = [sum(sum(records_in(g, tier, sizes)) for g in groups) for tier in TIERS]
        return np.array(totals, dtype=np.float64)

    @cached_property
    def _record_sizes(self) -> list[int]:
        """In the tier where they are largest."""
        return [nbytes for group in self._builder.groups for nbytes in group.records]

    def _sums_on_host(self, held: Floats, rows: Sequence[Shares]) -> Floats:
        """Sums that several blocks share are never on nvme."""
        summed = sum(g.gradients for g in self._builder.groups if g.summed)
        if not summed:
            return held
        moved = np.array([row[NVME] for row in rows]) * summed
        held = held.copy()
        held[:, NVME] -= np.minimum(moved, held[:, NVME])
        held[:, HOST] += moved
        return held

    def _needed(self, held: Mapping[StateClass, Floats]) -> tuple[dict[int, Floats], Floats]:
        """Bytes that each tier must hold, and what the machine or a budget lacks, weighed."""
        builder = self._builder
        home = sum(held.values())
        assert not isinstance(home, int), "three classes"
        on_nvme = home[:, NVME] > 0
        window = np.where(
            (held[StateClass.PARAMETERS][:, NVME] > 0) | (held[StateClass.GRADIENTS][:, NVME] > 0),
            builder.window_nbytes, self._largest_record,
        )  # fmt: skip
        activations = TierName(builder.config.placement.activations.tier)
        host = home[:, HOST] + self._staging(held) + least_window(activations, builder.gpu)
        host = host + np.where(on_nvme, window, 0)
        device = home[:, DEVICE].copy()
        if builder.gpu:
            device += builder.sums_nbytes + self._on_device
            device += np.where(
                held[StateClass.PARAMETERS][:, HOST:].sum(axis=1) > 0, builder.unit_nbytes, 0
            )
        else:
            host = host + builder.sums_nbytes
        stays, moves = (builder.shared[moves] for moves in (False, True))
        if stays is not None and moves is not None:
            computing = device if builder.gpu else host
            away = held[StateClass.PARAMETERS][:, HOST if builder.gpu else NVME :].sum(axis=1) > 0
            computing += np.where(away, moves.total_nbytes, stays.total_nbytes)
        nvme = home[:, NVME] + np.where(on_nvme, self._slack, 0)
        needed = {DEVICE: device, HOST: host, NVME: nvme}
        return needed, self._short(needed)

    def _short(self, needed: Mapping[int, Floats]) -> Floats:
        budgets, hardware = self._builder.budgets, self._builder.hardware
        limits = {
            DEVICE: min(budgets[TierName.DEVICE], self._device_room),
            HOST: budgets[TierName.HOST],
            NVME: min(budgets[TierName.NVME], hardware.nvme_free_nbytes),
        }
        of_tier = short_weights(gpu=self._builder.gpu)
        weights = {column: of_tier[tier] for column, tier in enumerate(TIERS)}
        short = sum(
            weights[column] * np.maximum(0, needed[column] - limit)
            for column, limit in limits.items()
        )
        memory = needed[HOST] + (0 if self._builder.gpu else needed[DEVICE])
        room = hardware.host_nbytes - self._room.elsewhere_nbytes
        result: Floats = np.maximum(short, weights[HOST] * np.maximum(0, memory - room))
        return result

    @cached_property
    def _largest_record(self) -> int:
        return max((group.largest_record for group in self._builder.groups), default=0)

    @cached_property
    def _slack(self) -> int:
        """As `plan.nvme_slack`."""
        largest = max((g.parameters + g.gradients for g in self._builder.groups), default=0)
        return 2 * largest + STAGING_BUFFERS * self._staging_of(dict.fromkeys(CLASSES, True))

    @cached_property
    def _on_device(self) -> int:
        from offload.planning.device_plan import plan_device

        builder = self._builder
        plan = plan_device(
            builder.explicit, builder.groups, builder.sizes, builder.hardware,
            builder.budgets[TierName.DEVICE],
        )  # fmt: skip
        return plan.total_nbytes if plan is not None else 0

    def _staging(self, held: Mapping[StateClass, Floats]) -> Floats:
        """All buffers together, which are as long as the classes on nvme make them."""
        there = {c: held[c][:, NVME] > 0 for c in CLASSES}
        total = np.zeros(len(next(iter(held.values()))))
        for chosen in itertools.product((False, True), repeat=len(CLASSES)):
            which = dict(zip(CLASSES, chosen, strict=True))
            rows = np.all([there[c] == which[c] for c in CLASSES], axis=0)
            if rows.any():
                total[rows] = STAGING_BUFFERS * self._staging_of(which)
        if self._builder.gpu:  # records on the device stage parameters and gradients, too
            whole = STAGING_BUFFERS * self._staging_of(dict.fromkeys(CLASSES, True))
            on_device = held[StateClass.GRADIENTS][:, DEVICE] > 0
            total = np.where(on_device, whole, total)
        return total

    def _staging_of(self, on_nvme: Mapping[StateClass, bool]) -> int:
        builder = self._builder
        placements = {
            c: Placement.on(TierName.NVME if on_nvme[c] else TierName.HOST) for c in CLASSES
        }
        return staging_nbytes_of(placements, builder.groups, builder.sizes, builder.gpu)


def _dealt(
    rows: Sequence[Shares], pieces: tuple[int, ...], in_tier: tuple[tuple[int, ...], ...]
) -> Floats:
    """Bytes per split and tier (N x 3)."""
    return np.array([_dealt_row(row, pieces, in_tier) for row in rows], dtype=np.float64)


@lru_cache(maxsize=2048)  # the searches of one question ask for the same again and again
def _dealt_row(
    row: Shares, pieces: tuple[int, ...], in_tier: tuple[tuple[int, ...], ...]
) -> list[int]:
    """`in_tier`: what each piece takes there."""
    held = dict.fromkeys(TIERS, 0)
    nbytes_in = dict(zip(TIERS, in_tier, strict=True))
    for piece, tier in enumerate(placement_of(row).assign(pieces)):
        held[tier] += nbytes_in[tier][piece]
    return list(held.values())


def _limited(rows: list[list[Shares]]) -> list[list[Shares]]:
    """Every other split, until there are not too many combinations."""
    while np.prod([len(each) for each in rows]) > _MOST_COMBINATIONS:
        rows = [each[::2] if len(each) > 2 else each for each in rows]
    return rows


def _rounded(seconds: Floats) -> Floats:
    """To three digits: less is no reason to prefer a placement."""
    least = max(float(seconds.min(initial=np.inf)), 1e-12)
    result: Floats = np.round(seconds / least, 3) if np.isfinite(least) else seconds
    return result


def _used(held: Floats) -> Numbers:
    """Which tiers hold something, as bits."""
    result: Numbers = ((held > 0) * np.array([1, 2, 4])).sum(axis=1)
    return result


def _first_of_each(kinds: Numbers, order: Numbers) -> Numbers:
    """Of `order` (rows, best first) the first row of each kind."""
    _, first = np.unique(kinds[order], return_index=True)
    result: Numbers = order[np.sort(first)]
    return result


def _merged(lists: Sequence[Sequence[Found]], count: int) -> list[Found]:
    best: dict[tuple[tuple[bool, ...], ...], Found] = {}
    for found in sorted(itertools.chain(*lists), key=_rank):
        best.setdefault(tuple(tuple(share > 0 for share in row) for row in found.shares), found)
    return list(best.values())[:count]


def _rank(found: Found) -> tuple[int, float, int, float, tuple[Shares, ...]]:
    split = sum(sum(share > 0 for share in row) for row in found.shares)
    depth = sum(row[HOST] + 2 * row[NVME] for row in found.shares)
    return found.short, float(f"{found.seconds:.3g}"), split, depth, found.shares
