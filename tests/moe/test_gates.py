"""The rules of choice, on logits that can be checked by eye."""

from typing import Any

import pytest
import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.moe.gate import Gate, GateOptions, Routing, capacity_of, top_1, top_2, top_k

PROBABILITIES = torch.tensor(
    [[0.50, 0.30, 0.15, 0.05], [0.60, 0.25, 0.10, 0.05], [0.45, 0.40, 0.10, 0.05],
     [0.05, 0.10, 0.15, 0.70]]
)  # fmt: skip
LOGITS = PROBABILITIES.log()
OPTIONS: dict[str, Any] = {
    "num_experts": 8, "k": 2, "capacity_factor": 1.0, "eval_capacity_factor": 1.0,
    "min_capacity": 4, "noisy_gate_policy": None, "drop_tokens": True, "use_rts": True,
    "top2_2nd_expert_sampling": True,
}  # fmt: skip


def gate(hidden: int = 16, **options: Any) -> Gate:
    return Gate(hidden, GateOptions(**{**OPTIONS, **options}))


def kept(routing: Routing) -> list[list[int]]:
    rows = zip(routing.experts.tolist(), routing.kept.tolist(), strict=True)
    return [[e for e, there in zip(*row, strict=True) if there] for row in rows]


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "min_capacity", "places"),
    [(64, 8, 1.0, 4, 8), (64, 8, 1.25, 4, 10), (65, 8, 1.0, 4, 9), (8, 8, 1.0, 4, 4),
     (1, 8, 1.0, 0, 1), (0, 8, 1.0, 4, 4), (0, 8, 1.0, 0, 0)],
)  # fmt: skip
def test_capacity_is_rounded_up(
    tokens: int, experts: int, factor: float, min_capacity: int, places: int
) -> None:
    assert capacity_of(tokens, experts, factor, min_capacity) == places


def test_top_1_keeps_the_tokens_that_chance_prefers() -> None:
    uniform = torch.tensor([0.1, 0.9, 0.5, 0.2])  # tokens 0, 1 and 2 want expert 0
    routing = top_1(LOGITS, 2.0, 0, uniform=uniform)
    assert kept(routing) == [[], [0], [0], [3]]
    assert routing.weights[:, 0].tolist() == pytest.approx([0.0, 0.60, 0.45, 0.70])
    assert routing.exp_counts.tolist() == [3, 0, 0, 1]  # before any is dropped
    share = torch.tensor([0.75, 0, 0, 0.25])
    assert routing.l_aux.item() == pytest.approx(4 * (PROBABILITIES.mean(0) * share).sum().item())


def test_gumbel_noise_is_in_the_choice_and_not_in_the_weight() -> None:
    noise = torch.zeros(4, 4)
    noise[0, 2] = 100.0
    routing = top_1(LOGITS, 4.0, 0, gumbel=noise)
    assert kept(routing)[0] == [2]
    assert routing.weights[0].item() == pytest.approx(0.15)


def test_top_2_gives_first_choices_their_places_first() -> None:
    routing = top_2(LOGITS, 1.0, 0)  # two places each
    assert kept(routing) == [[0, 1], [0, 1], [], [3, 2]]
    # the third token's second choice, expert 1, comes after two others
    assert routing.weights[0].tolist() == pytest.approx([0.5 / 0.8, 0.3 / 0.8])
    assert routing.weights[2].tolist() == [0.0, 0.0]


def test_gumbel_noise_draws_the_second_choice_alone() -> None:
    noise = torch.zeros(4, 4)
    noise[:, 3] = 100.0
    assert kept(top_2(LOGITS, 4.0, 0, gumbel=noise)) == [[0, 3], [0, 3], [0, 3], [3, 2]]


def test_a_full_expert_keeps_the_largest_scores() -> None:
    by_score = top_k(LOGITS, 2, 0.5, 0)  # one place each
    assert kept(by_score) == [[], [0], [1], [3, 2]]
    assert by_score.weights[1].tolist() == pytest.approx([1.0, 0.0])  # normalised over those kept


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_without_drops_every_route_is_kept(k: int) -> None:
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(k))
    if k == 1:
        routings = [top_1(logits, 1.0, 0, drop=False)]
    else:
        routings = [top_k(logits, k, 1.0, 0, drop=False)]
    routings += [top_2(logits, 1.0, 0, drop=False)] if k == 2 else []
    for routing in routings:
        assert routing.kept.all()
        assert routing.exp_counts.sum() == 50 * k
        assert k == 1 or torch.allclose(routing.weights.sum(1), torch.ones(50))


def test_a_token_that_is_not_used_goes_nowhere_and_takes_no_place() -> None:
    used = torch.tensor([False, True, True, True])
    for routing in (
        top_1(LOGITS, 1.0, 0, used=used), top_2(LOGITS, 1.0, 0, used=used),
        top_k(LOGITS, 2, 1.0, 0, used=used),
    ):  # fmt: skip
        assert kept(routing)[0] == []
        assert routing.weights[0].sum() == 0
        assert routing.exp_counts.sum() == 3 * routing.experts.shape[1]
    # where the first one would have been
    assert kept(top_2(LOGITS, 1.0, 0, used=used))[2] == [0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_give_choices_and_poison_weights(bad: float) -> None:
    logits = LOGITS.clone()
    logits[1] = bad
    for routing in (
        top_1(logits, 0.5, 0), top_2(logits, 0.5, 0), top_k(logits, 3, 0.5, 0),
    ):  # fmt: skip
        assert ((routing.experts >= 0) & (routing.experts < 4)).all()
        assert routing.weights[1].isnan().all()
        assert not routing.weights[[0, 2, 3]].isnan().any()
        assert routing.l_aux.isnan()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_experts": 0}, "num_experts is 0"), ({"k": 9}, "1 to 8 of 8 experts"),
        ({"k": 0}, "k is 0"), ({"capacity_factor": 0.0}, "capacity_factor is 0.0"),
        ({"eval_capacity_factor": -1.0}, "eval_capacity_factor is -1.0"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
        ({"capacity_factor": float("inf")}, "drop_tokens=False"),
        ({"min_capacity": -1}, "min_capacity is -1"),
        ({"noisy_gate_policy": "Jiter"}, "'Jitter'"),
        ({"noisy_gate_policy": "RSample"}, "for k=1"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_work_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gate(**options)


# ------------------------------------------------------------------------ random numbers
NOISY = [
    {"k": 1}, {"k": 2}, {"k": 1, "noisy_gate_policy": "RSample"},
    {"k": 4, "noisy_gate_policy": "Jitter"},
]  # fmt: skip


def x_of(seed: int = 0, tokens: int = 40) -> Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", NOISY, ids=str)
def test_evaluation_draws_nothing(options: dict[str, Any]) -> None:
    one = gate(**options).eval()
    before = torch.get_rng_state()
    one(x_of())
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_are_fp32_also_under_autocast() -> None:
    one = gate(k=4)
    x = x_of()
    plain = one(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = one(x)
    assert torch.equal(plain.weights, cast.weights)
    assert plain.weights.dtype == torch.float32
    assert one.bfloat16()(x.bfloat16()).weights.dtype == torch.float32
