"""Norms of gradients: each parameter's, of all together, and the clip coefficient.

`kernels/cpu/gradients.py` sums squares while gradients are copied; here they are added up over
a parameter, over ranks, and over the model. Each parameter's norm is rounded to fp32 once, and the
norms are added up in the order and with the rounding of `torch.nn.utils.clip_grad_norm_`, so that
this function, called with the gradients of an engine, clips to the same bits. Over plain gradients
it sums squares in fp32, and its norm is farther from the one in float64.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from offload.zero.groups.group import ParamGroup
from offload.zero.ranks.reduction import Reductions
from offload.zero.ranks.sharding import Sharding
from offload.zero.ranks.tensor_parallel import TensorParallel
from offload.zero.step.optimizer_state import OptimizerState

Place = tuple[int, int]  # a group, and a parameter in it


class GradientNorms:
    """2-norms of the gradients of `states`, fp32, kept until `invalidate`.

    On several ranks all must ask, and one exchange answers them, except for experts that one rank
    alone has: it knows their norms. `loss_scale` is the factor that multiplied the gradients.
    """

    def __init__(
        self, states: Sequence[OptimizerState], reductions: Reductions,
        tensor_parallel: TensorParallel | None,
    ) -> None:  # fmt: skip
        self._states = states
        self._reductions = reductions
        self._tensor_parallel = tensor_parallel
        self._counted_elsewhere = [
            frozenset() if tensor_parallel is None
            else tensor_parallel.counted_elsewhere(state.group.params)
            for state in states
        ]  # fmt: skip
        self._order: list[Sequence[Place]] = []
        self._places: dict[Place, int] = {}
        self._norms: torch.Tensor | None = None  # of the current gradients, once computed
        self._elsewhere = torch.zeros(0)  # ... of all ranks' experts that are spread over ranks

    def add_in(self, order: Sequence[Sequence[Place]]) -> None:
        """Add norms in this order: torch's clipping has that of `model.parameters()`, and rounds
        in between. A parameter has one place, or one for each of its rows."""
        self._order = list(order)
        self._spread = [
            number for number, places in enumerate(self._order)
            if self._group_of(places).ep_size > 1
        ]  # fmt: skip
        self._places = {
            place: number for number, places in enumerate(self._order) for place in places
        }

    def invalidate(self) -> None:
        self._norms = None

    def of(self, places: Sequence[Place], loss_scale: float) -> torch.Tensor:
        """Return the norm of one parameter's gradient, 0-dim; `places`: of a packed one's rows."""
        sharding = self._reductions.sharding.of_experts(self._group_of(places).ep_size)
        alone = not self._reductions.has_others and self._tensor_parallel is None
        if alone or sharding.world_size == 1:  # no other rank has a part of the parameter
            return _norms_of([self._square_of(places)], loss_scale)[0]
        return self._all(loss_scale)[self._places[places[0]]]

    def total(self, loss_scale: float) -> torch.Tensor:
        """Return the norm of all norms, as `torch.nn.utils.clip_grad_norm_` has it."""
        norms = self._all(loss_scale)
        there = [
            any(self._states[group].gradients.passes[index] for group, index in places)
            for places in self._order
        ]  # fmt: skip
        for number in self._spread:  # counted with all ranks', in the same order on each
            there[number] = False
        counted = [norms[torch.tensor(there, dtype=torch.bool)], self._elsewhere]
        total: torch.Tensor = torch.linalg.vector_norm(torch.cat(counted))
        return total

    def nonfinite(self, loss_scale: float) -> list[str]:
        """Return the names of parameters whose gradient is infinite or NaN on some rank, in order.
        Experts that only others have are named by those that are in their place here."""
        params = [(number, "") for number in _nonfinite(self._all(loss_scale))]
        for place in _nonfinite(self._elsewhere):
            kind, number = divmod(place, len(self._spread))
            if kind != self._own_kind():
                params.append((self._spread[number], f" (of expert rank {kind}, in its place)"))
        return [self._name_of(number) + whose for number, whose in sorted(params)]

    @property
    def numel(self) -> int:
        """The number of parameters that count."""
        return len(self._order)

    def _name_of(self, number: int) -> str:
        """Return a parameter's name; for a packed one, its first row's."""
        group, index = self._order[number][0]
        return self._states[group].group.layout.params[index].name

    def _all(self, loss_scale: float) -> torch.Tensor:
        """Return the norms in order, the same on every rank; 0 where there is no gradient."""
        if self._norms is None:
            squares = [self._square_of(places) for places in self._order]
            if self._reductions.has_others:
                rows = self._reductions.all_squares(squares)
                sharding = self._reductions.sharding
                first = sharding.replica * sharding.ranks
                squares = _added_up(rows[first : first + sharding.ranks])
                if self._spread:
                    self._count_experts(squares, rows, sharding, loss_scale)
            if self._tensor_parallel is not None:
                squares = _added_up(self._tensor_parallel.ranks.exchange_sums(squares))
            self._norms = _norms_of(squares, loss_scale)
        return self._norms

    def _count_experts(
        self, squares: list[float], rows: np.ndarray, sharding: Sharding, loss_scale: float
    ) -> None:
        """Count each expert once, whichever ranks have it, or parts of it."""
        ep_size = self._group_of(self._order[self._spread[0]]).ep_size
        among = sharding.of_experts(ep_size).ranks  # with different parts; the rest are replicas
        by_kind = [
            _added_up(rows[kind : among * ep_size : ep_size, self._spread])
            for kind in range(ep_size)
        ]  # fmt: skip
        for number, square in zip(self._spread, by_kind[self._own_kind()], strict=True):
            squares[number] = square
        self._elsewhere = _norms_of([each for row in by_kind for each in row], loss_scale)

    def _own_kind(self) -> int:
        """Return which of the spread experts this rank has."""
        sharding = self._reductions.sharding
        ep_size = self._group_of(self._order[self._spread[0]]).ep_size
        return (sharding.replica * sharding.ranks + sharding.rank) % ep_size

    def _group_of(self, places: Sequence[Place]) -> ParamGroup:
        return self._states[places[0][0]].group

    def _square_of(self, places: Sequence[Place]) -> float:
        return math.fsum(
            self._states[group].gradients.square(index)
            for group, index in places if index not in self._counted_elsewhere[group]
        )  # fmt: skip


def clip_coefficient(total: torch.Tensor, limit: float | None) -> float:
    """Return the factor for gradients, bit for bit as `torch.nn.utils.clip_grad_norm_` has it."""
    if limit is None or not bool(total.isfinite()):
        return 1.0
    return float(torch.clamp(limit / (total + 1e-6), max=1.0))


def _norms_of(squares: Sequence[float], loss_scale: float) -> torch.Tensor:
    norms = [math.sqrt(square) / loss_scale for square in squares]
    return torch.tensor(norms, dtype=torch.float64).to(torch.float32)


def _nonfinite(norms: torch.Tensor) -> list[int]:
    places: list[int] = (~norms.isfinite()).nonzero().flatten().tolist()
    return places


def _added_up(rows: np.ndarray) -> list[float]:
    """Return sums of squares over ranks, one row each."""
    return [math.fsum(column) for column in rows.T.tolist()]
