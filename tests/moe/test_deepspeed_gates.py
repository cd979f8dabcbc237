"""Gates beside DeepSpeed's own functions: masks, weights, losses and counts, bit by bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.moe import MoE
from offload.moe.gate import Routing, _gumbel, _jitter, capacity_of, top_1, top_2, top_k

theirs = pytest.importorskip("deepspeed.moe.sharded_moe")
CPU = torch.device("cpu")
LOGITS = 10_000  # tokens with logits of their own, in all cases of a function
T, E = 125, 12
FACTORS = (0.3, 1.0, 4.0)


@contextmanager
def drawing(**noise: Tensor) -> Iterator[None]:
    names = ("uniform", "gumbel", "exp_selection_uniform")
    maps = {name: getattr(theirs, f"{name}_map") for name in names}
    before = {name: dict(each) for name, each in maps.items()}
    for name, values in noise.items():
        maps[name][CPU] = lambda shape, values=values: values.expand(shape)
    try:
        yield
    finally:
        for name, each in maps.items():
            each.clear()
            each.update(before[name])


def check(routing: Routing, expected: tuple[Tensor, ...]) -> None:
    l_aux, weights, mask, counts = expected
    assert torch.equal(by_expert(routing), weights.sum(2))  # TEC: a token has one place there
    assert torch.equal(by_expert(routing) > 0, mask.any(2))
    assert torch.equal(routing.l_aux, l_aux)
    assert torch.equal(routing.exp_counts, counts)


def by_expert(routing: Routing) -> Tensor:
    """The weight of each expert for each token, TE."""
    zeros = torch.zeros(len(routing.experts), len(routing.exp_counts))
    return zeros.scatter(1, routing.experts, routing.weights)


def cases() -> Iterator[tuple[int, Tensor, torch.Generator, tuple[float, int, bool]]]:
    settings = list(product(FACTORS, (0, 20), (True, False)))
    for number in range(LOGITS // T):
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(T, E, generator=generator) * (1 + number % 5)
        yield number, logits, generator, settings[number % len(settings)]


def test_capacities_are_equal() -> None:
    for tokens, experts, factor, min_capacity in product(
        range(1, 200, 7), (1, 3, 7, 64), (0.1, 1.0, 1.2, 1.25, 3.3), (0, 4)
    ):
        expected = theirs._capacity(
            torch.empty(tokens, experts), torch.tensor(factor), torch.tensor(min_capacity)
        )
        assert capacity_of(tokens, experts, factor, min_capacity) == int(expected)


def test_top_1_is_equal() -> None:
    for number, logits, generator, (factor, min_capacity, drop) in cases():
        uniform, gumbel = (
            torch.rand(T, generator=generator),
            torch.rand(T, E, generator=generator).mul(9),
        )
        chance, sampled = number % 2 == 0, number % 3 == 0
        used = torch.rand(T, generator=generator) < 0.8 if number % 5 == 0 else None
        actual = top_1(
            logits, factor, min_capacity, drop=drop, uniform=uniform if chance else None,
            gumbel=gumbel if sampled else None, used=used,
        )  # fmt: skip
        with drawing(exp_selection_uniform=uniform[:, None], gumbel=gumbel):
            expected = theirs.top1gating(
                logits, factor, min_capacity, None if used is None else used.long(),
                "RSample" if sampled else None, drop, chance,
            )  # fmt: skip
        check(actual, expected)


def test_top_2_is_equal() -> None:
    for number, logits, generator, (factor, min_capacity, drop) in cases():
        gumbel = torch.randn(T, E, generator=generator)
        sampled = number % 2 == 0
        actual = top_2(logits, factor, min_capacity, drop=drop, gumbel=gumbel if sampled else None)
        with drawing(gumbel=gumbel):
            expected = theirs.top2gating(
                logits.clone(), factor, min_capacity, drop, top2_2nd_expert_sampling=sampled
            )  # it adds to the logits in place
        check(actual, expected)


def test_top_k_is_equal() -> None:
    for number, logits, _, (factor, min_capacity, drop) in cases():
        k = 1 + number % 6
        actual = top_k(logits, k, factor, min_capacity, drop=drop)
        check(actual, theirs.topkgating(logits, k, factor, min_capacity, drop))


@pytest.mark.parametrize(
    ("routing", "other"),
    [
        (lambda x: top_1(x, 0.5, 0), lambda x: theirs.top1gating(x, 0.5, 0, use_rts=False)),
        (lambda x: top_2(x, 0.5, 0),
         lambda x: theirs.top2gating(x, 0.5, 0, top2_2nd_expert_sampling=False)),
        (lambda x: top_k(x, 4, 0.5, 0), lambda x: theirs.topkgating(x, 4, 0.5, 0)),
    ],
)  # fmt: skip
def test_gradients_agree(
    routing: Callable[[Tensor], Routing], other: Callable[[Tensor], tuple[Tensor, ...]]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    factor = torch.randn(40, 8)
    actual, expected = routing(x), other(y)
    (by_expert(actual) * factor).sum().add(actual.l_aux).backward()
    (expected[1].sum(2) * factor).sum().add(expected[0]).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-7)


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1}, {"k": 2}, {"k": 4}, {"k": 1, "noisy_gate_policy": "RSample"},
        {"k": 2, "noisy_gate_policy": "Jitter"}, {"k": 1, "drop_tokens": False},
        {"k": 2, "use_residual": True, "capacity_factor": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_the_layer_computes_what_deepspeeds_does(options: dict[str, Any]) -> None:
    from deepspeed.moe.layer import MoE as TheirMoE

    torch.manual_seed(0)
    options = {"num_experts": 6, "min_capacity": 2, **options}
    mine = MoE(16, expert(), **options)
    other = TheirMoE(16, expert(), **options)
    for mine_now, their_now in zip(
        mine.experts, other.deepspeed_moe.experts.deepspeed_experts, strict=True
    ):
        for param in mine_now.parameters():
            nn.init.normal_(param, std=0.3)
        their_now.load_state_dict(mine_now.state_dict())
    other.deepspeed_moe.gate.wg.weight.data.copy_(mine.gate.weight)
    if mine.use_residual:
        other.mlp.load_state_dict(mine.mlp.state_dict())
        other.coefficient.load_state_dict(mine.coefficient.state_dict())
    x = torch.randn(4, 10, 16)
    torch.manual_seed(1)
    drawn = {}  # as they are drawn in the forward
    if options.get("noisy_gate_policy") == "Jitter":
        drawn["uniform"] = _jitter(torch.empty(40, 16))
    if options.get("noisy_gate_policy") == "RSample" or options["k"] == 2:
        drawn["gumbel"] = _gumbel(torch.empty(40, 6))
    if options["k"] == 1 and options.get("drop_tokens", True):
        drawn["exp_selection_uniform"] = torch.rand(40)[:, None]
    torch.manual_seed(1)
    actual = mine(x)
    with drawing(**drawn):
        expected = other(x)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])
