"""What one rank of a mesh knows all of them know after a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from offload.errors import LowMemoryError
from offload.zero.gradients import norms
from offload.zero.gradients.norms import MemoryAlarm

MIB = 1 << 20


class Mesh:
    """Ranks of `rows` by `columns`, counted row by row; `left` says what is left on some."""

    def __init__(
        self, rows: int, columns: int, left: dict[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._columns, self._rows, self._monkeypatch = columns, rows, monkeypatch
        self.left = left
        self.alarms = [
            MemoryAlarm(lambda rank=rank: self.left.get(rank))  # type: ignore[misc]
            for rank in range(rows * columns)
        ]

    def step(self) -> None:
        self._monkeypatch.setattr(norms.dist, "is_initialized", lambda: True)
        for rank, alarm in enumerate(self.alarms):
            self._monkeypatch.setattr(norms.dist, "get_rank", lambda rank=rank: rank)
            alarm.look()
        numbers = range(len(self.alarms))
        for column in range(self._columns):
            self._exchange(list(numbers[column :: self._columns]))
        for row in range(self._rows):
            self._exchange(list(numbers[row * self._columns : (row + 1) * self._columns]))

    def _exchange(self, ranks: Sequence[int]) -> None:
        sent: list[list[float]] = []
        for rank in ranks:  # as all of them send before any receives
            known = self.alarms[rank]._known
            sent.append([rank + 0.5, *known])
        for rank in ranks:
            got = self.alarms[rank].spread(lambda numbers: np.array(sent), [rank + 0.5])
            assert got.tolist() == [[each + 0.5] for each in ranks]

    def said(self) -> list[str | None]:
        return [refusal(alarm) for alarm in self.alarms]


def refusal(alarm: MemoryAlarm) -> str | None:
    try:
        alarm.check()
    except LowMemoryError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (1, 3), (2, 2), (3, 2)])
def test_whichever_rank_is_short_all_stop_once_and_name_the_same_one(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for short in range(rows * columns):
        mesh = Mesh(rows, columns, {short: 3 * MIB}, monkeypatch)
        mesh.step()
        (text,) = set(mesh.said())
        assert text is not None
        assert text.startswith(f"rank {short} has 3.0 MiB of RAM left, the kernel may kill it")
        assert set(mesh.said()) == {None}  # until the next step
        mesh.step()
        assert None not in mesh.said()
        mesh.left.clear()
        mesh.step()
        assert set(mesh.said()) == {None}


def test_of_several_that_are_short_one_is_enough_and_none_left_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh(2, 2, {1: 0, 2: MIB}, monkeypatch)
    mesh.step()
    assert None not in mesh.said()
