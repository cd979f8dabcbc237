"""Generators draw the same numbers again, and afterwards go on as if they had not."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from offload.zero.recompute import random_state
from offload.zero.recompute.random_state import RandomState

GLOBAL = {"python": random._inst, "numpy": np.random.mtrand._rand}
_NORMAL = {random.Random: "gauss", np.random.RandomState: "normal"}
DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda generator: generator.uniform(0.0, 1.0),
    "one of two normal": lambda generator: getattr(generator, _NORMAL[type(generator)])(0.0, 1.0),
}


@pytest.fixture(params=GLOBAL)
def generator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A global one, from a known state; what other tests draw stays what it was."""
    shared = GLOBAL[request.param]
    before = random_state.state_of(shared)
    shared.seed(7)
    yield shared
    RandomState([shared])._put([before], [None])


@pytest.mark.parametrize("rounds", range(4))
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_are_drawn_again_and_then_go_on(
    generator: Any, draw: Callable[[Any], Any], rounds: int
) -> None:
    """Normal numbers come in pairs: after an odd number of them a state has the second one."""
    for _ in range(rounds):
        draw(generator)
    start = RandomState([generator])
    expected = [draw(generator) for _ in range(3)]
    for _ in range(2):
        with start.again():
            assert [draw(generator) for _ in range(3)] == expected
    with start.again():
        for _ in range(5):
            draw(generator)
    continued = [draw(generator) for _ in range(3)]
    generator.seed(7)
    drawn = [draw(generator) for _ in range(rounds + 6)]
    assert drawn[rounds:] == [*expected, *continued]


def test_a_state_of_before_is_whole_when_it_is_set_again(generator: Any) -> None:
    """The words are those of a state that was seen since, without the second number of a pair."""
    draw = DRAWS["one of two normal"]
    draw(generator)
    half = random_state.state_of(generator)
    draw(generator)
    RandomState([generator])
    RandomState([generator])._put([half], [None])
    start = RandomState([generator])
    expected = [draw(generator) for _ in range(3)]
    with start.again():
        assert [draw(generator) for _ in range(3)] == expected


def test_a_generator_spawns_the_same_children_again() -> None:
    generator = np.random.default_rng(3)
    generator.spawn(2)
    start = RandomState([generator])
    expected = generator.spawn(1)[0].random()
    with start.again():
        assert generator.spawn(1)[0].random() == expected
    assert generator.spawn(1)[0].random() == np.random.default_rng(3).spawn(4)[3].random()
