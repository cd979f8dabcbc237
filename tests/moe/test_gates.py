"""The rules of choice, on logits that can be checked by eye."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.moe.gate import Gate, GateOptions
from offload.moe.gating import capacity_of, top_1, top_2, top_k, z_loss
from offload.moe.routing import Routing

PROBABILITIES = torch.tensor(
    [[0.50, 0.30, 0.15, 0.05], [0.60, 0.25, 0.10, 0.05], [0.45, 0.40, 0.10, 0.05],
     [0.05, 0.10, 0.15, 0.70]]
)  # fmt: skip
LOGITS = PROBABILITIES.log()
OPTIONS: dict[str, Any] = {
    "num_experts": 8, "k": 2, "capacity_factor": 1.0, "eval_capacity_factor": 1.0,
    "min_capacity": 4, "noisy_gate_policy": None, "drop_tokens": True, "use_rts": True,
    "top2_2nd_expert_sampling": True, "drop_policy": None, "scores": "softmax", "groups": None,
    "bias_update_rate": 0.0, "z_loss_weight": 0.0,
}  # fmt: skip


def gate(hidden: int = 16, seed: int | None = None, **options: Any) -> Gate:
    return Gate(hidden, GateOptions(**{**OPTIONS, **options}), seed)


def kept(routing: Routing) -> list[list[int]]:
    """The experts of each token."""
    rows = zip(routing.experts.tolist(), routing.kept.tolist(), strict=True)
    return [[e for e, there in zip(*row, strict=True) if there] for row in rows]


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "least", "places"),
    [(64, 8, 1.0, 4, 8), (64, 8, 1.25, 4, 10), (65, 8, 1.0, 4, 9), (8, 8, 1.0, 4, 4),
     (1, 8, 1.0, 0, 1), (0, 8, 1.0, 4, 4), (0, 8, 1.0, 0, 0)],
)  # fmt: skip
def test_capacity_is_rounded_up(
    tokens: int, experts: int, factor: float, least: int, places: int
) -> None:
    assert capacity_of(tokens, experts, factor, least) == places


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
    assert routing.capacity == 2
    assert kept(routing) == [[0, 1], [0, 1], [], [3, 2]]
    # the third token's second choice, expert 1, comes after two others
    assert routing.weights[0].tolist() == pytest.approx([0.5 / 0.8, 0.3 / 0.8])
    assert routing.weights[2].tolist() == [0.0, 0.0]


def test_gumbel_noise_draws_the_second_choice_alone() -> None:
    noise = torch.zeros(4, 4)
    noise[:, 3] = 100.0
    assert kept(top_2(LOGITS, 4.0, 0, gumbel=noise)) == [[0, 3], [0, 3], [0, 3], [3, 2]]


def test_a_full_expert_keeps_the_largest_scores_or_the_first_tokens() -> None:
    by_score = top_k(LOGITS, 2, 0.5, 0)  # one place each
    assert kept(by_score) == [[], [0], [1], [3, 2]]
    by_position = top_k(LOGITS, 2, 0.5, 0, drop_policy="position")
    assert kept(by_position) == [[0, 1], [], [], [3, 2]]
    assert by_score.weights[1].tolist() == pytest.approx([1.0, 0.0])  # normalised over those kept


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_without_drops_every_route_is_kept(k: int) -> None:
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(k))
    if k == 1:
        found = [top_1(logits, 1.0, 0, drop=False)]
    else:
        found = [top_k(logits, k, 1.0, 0, drop=False)]
    found += [top_2(logits, 1.0, 0, drop=False)] if k == 2 else []
    for routing in found:
        assert routing.kept.all()
        assert routing.exp_counts.sum() == 50 * k
        assert routing.dispatch_mask().sum() == 50 * k
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
    assert kept(top_2(LOGITS, 1.0, 0, used=used))[2] == [
        0,
        1,
    ]  # where the first one would have been


def test_a_bias_changes_the_choice_and_not_the_weight() -> None:
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    routing = top_k(LOGITS, 2, 4.0, 0, bias=bias)
    assert kept(routing) == [[3, 0], [3, 0], [3, 0], [3, 2]]
    assert routing.weights[0].tolist() == pytest.approx([0.05 / 0.55, 0.5 / 0.55])


def test_groups_limit_the_choice() -> None:
    routing = top_k(LOGITS, 2, 4.0, 0, groups=(2, 1))
    assert kept(routing) == [[0, 1], [0, 1], [0, 1], [3, 2]]
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6]])  # the best expert is in the group of less sum
    assert kept(top_k(torch.logit(scores), 2, 4.0, 0, groups=(2, 1))) == [[0, 1]]
    assert kept(top_k(torch.logit(scores), 2, 4.0, 0, groups=(2, 1), sigmoid=True)) == [[2, 3]]
    low = torch.full((4,), -5.0)  # also where every biased score is below zero
    assert kept(top_k(LOGITS, 2, 4.0, 0, groups=(2, 1), bias=low)) == kept(routing)


def test_sigmoid_scores_are_normalised_over_the_chosen() -> None:
    scores = torch.tensor([[0.8, 0.4, 0.2, 0.1]])
    routing = top_k(torch.logit(scores), 2, 4.0, 0, sigmoid=True)
    assert routing.weights[0].tolist() == pytest.approx([2 / 3, 1 / 3])
    alone = top_k(torch.logit(scores), 1, 4.0, 0, sigmoid=True, normalise=False)
    assert alone.weights.item() == pytest.approx(0.8)
    even = torch.zeros(6, 4)  # a loss of 1 for a balanced load, whatever k is
    assert top_k(even, 4, 1.0, 9, sigmoid=True).l_aux.item() == pytest.approx(1.0)


def test_z_loss_is_the_mean_square_of_log_sum_exp() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    expected = ((0.6931472) ** 2 + (1.6931472) ** 2) / 2
    assert z_loss(logits).item() == pytest.approx(expected)
    assert z_loss(logits[:0]).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_give_choices_and_poison_weights(bad: float) -> None:
    logits = LOGITS.clone()
    logits[1] = bad
    for routing in (
        top_1(logits, 0.5, 0), top_2(logits, 0.5, 0), top_k(logits, 3, 0.5, 0),
        top_k(logits, 2, 0.5, 0, groups=(2, 1), bias=torch.zeros(4)),
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
        ({"noisy_gate_policy": "RSample"}, "for k=1"), ({"scores": "relu"}, "'sigmoid'"),
        ({"drop_policy": "random"}, "'probs'"), ({"drop_policy": "probs"}, "by position"),
        ({"groups": (3, 1)}, "3 equal groups"), ({"groups": (4, 5)}, "5 of 4 groups"),
        ({"groups": (0, 0)}, "0 equal groups"),
        ({"groups": (8, 1)}, "have 1 experts, and a token chooses 2"),
        ({"bias_update_rate": -1.0}, "bias_update_rate is -1.0"),
        ({"z_loss_weight": float("nan")}, "z_loss_weight is nan"),
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


def decided(routing: Routing) -> Tensor:
    return torch.cat([(routing.experts * routing.kept).float(), routing.weights], 1)


@pytest.mark.parametrize("options", NOISY, ids=str)
def test_random_numbers_follow_from_seed_and_number_of_the_call(options: dict[str, Any]) -> None:
    tight = {"capacity_factor": 0.5, "min_capacity": 0, **options}
    one, other, again = gate(seed=3, **tight), gate(seed=4, **tight), gate(seed=3, **tight)
    other.weight.data.copy_(one.weight)
    again.weight.data.copy_(one.weight)
    x, y = x_of(), x_of(1)
    first = decided(one(x))
    torch.rand(5)  # torch's own generator has no part in it
    second = decided(one(y))
    assert torch.equal(decided(one(x)), first)  # known by its input
    assert not torch.equal(decided(other(x)), first)
    assert torch.equal(decided(again(x)), first)
    other.load_state_dict(again.state_dict())  # what comes next follows from a checkpoint
    assert torch.equal(decided(other(y)), second)


def test_rounding_in_a_layer_before_draws_no_other_numbers() -> None:
    one, other = gate(seed=3), gate(seed=3)
    first, second = one.noise_for(x_of()), other.noise_for(x_of() * (1 + 1e-6))
    assert torch.equal(first.uniform(9), second.uniform(9))


def test_a_frozen_gate_does_not_remember_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.moe.gate._IN_FLIGHT", 3)
    one = gate(seed=3)
    draws = [one.noise_for(x_of(number)).uniform(4).tolist() for number in range(9)]
    assert [one.noise_for(x_of(number)).uniform(4).tolist() for number in (6, 7, 8)] == draws[6:]
    assert len(one._numbers) == 3


@pytest.mark.parametrize("options", NOISY, ids=str)
def test_evaluation_draws_nothing(options: dict[str, Any]) -> None:
    one, other = gate(seed=3, **options).eval(), gate(seed=4, **options).eval()
    other.weight.data.copy_(one.weight)
    before = torch.get_rng_state()
    assert torch.equal(decided(one(x_of())), decided(other(x_of())))
    assert torch.equal(torch.get_rng_state(), before)


def test_other_inputs_and_weights_draw_other_numbers() -> None:
    one = gate(seed=3)
    found = [one.noise_for(x_of(number)).uniform(4).tolist() for number in range(50)]
    for _ in range(50):
        with torch.no_grad():
            one.weight[0, 0] += 1e-6
        found.append(one.noise_for(x_of()).uniform(4).tolist())
    assert len({tuple(each) for each in found}) == 100
    same = torch.ones(4, 16, dtype=torch.bfloat16)
    draws = {tuple(one.noise_for(same * n).uniform(4).tolist()) for n in range(20)}
    assert len(draws) == 20


def test_noise_has_its_distributions() -> None:
    noise = gate(seed=0).noise_for(x_of())
    jitter, uniform, gumbel = noise.jitter(20000), noise.uniform(20000), noise.gumbel(20000)
    assert 0.99 <= jitter.min() < 0.9901
    assert 1.0099 < jitter.max() <= 1.01
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    assert gumbel.mean().item() == pytest.approx(0.5772, abs=0.05)
    assert gumbel.var().item() == pytest.approx(1.6449, abs=0.1)
    assert gumbel.isfinite().all()


def test_a_choice_by_gumbel_noise_follows_the_probabilities() -> None:
    one = gate(hidden=4, num_experts=4, k=1, noisy_gate_policy="RSample", drop_tokens=False, seed=0)
    one.weight.data.copy_(torch.diag(LOGITS[0]))
    counts = one(torch.ones(20000, 4)).exp_counts / 20000
    torch.testing.assert_close(counts, PROBABILITIES[0], atol=0.02, rtol=0)


def test_a_meta_gate_initialises_itself() -> None:
    with torch.device("meta"):
        one = gate(seed=7, k=4, bias_update_rate=0.1)
    one = one.to_empty(device="cpu")
    one.reset_parameters()
    assert one.seed.item() == 7
    assert one.weight.abs().max() <= 0.25
    assert not one.load.any()
    assert not one.choice_bias.any()


# ------------------------------------------------------------------------ balancing
def test_the_bias_moves_once_per_step_by_the_sign_of_the_error() -> None:
    one = gate(num_experts=4, k=1, bias_update_rate=0.01, hidden=4, drop_tokens=False)
    one.weight.data.copy_(torch.eye(4) * 5)
    x = torch.eye(4)[[0, 0, 0, 1]]
    one(x)
    one(x)
    assert one.load.tolist() == [6, 2, 0, 0]
    assert not one.choice_bias.any()
    one.eval()(x)
    assert one.load.tolist() == [6, 2, 0, 0]
    one.train()
    with torch.no_grad():
        one.weight += 1e-3  # a step
    one(x)
    assert one.choice_bias.tolist() == pytest.approx([-0.01, 0.0, 0.01, 0.01])
    assert one.load.tolist() == [3, 1, 0, 0]


def test_what_ranks_have_counted_is_added_up_once() -> None:
    """Also by steps that leave the weight as it is: frozen, or with a learning rate of 0."""
    options: dict[str, Any] = {"num_experts": 4, "hidden": 4, "bias_update_rate": 0.01}
    ranks = [gate(k=1, drop_tokens=False, **options) for _ in range(2)]
    for each in ranks:
        each.weight.data.copy_(torch.eye(4) * 5)
    for steps in (1, 2, 3):
        ranks[0](torch.eye(4)[[0, 0, 1]])
        ranks[1](torch.eye(4)[[2]])
        total = ranks[0].own_load + ranks[1].own_load
        for each in ranks:
            each.share_load(total)
            assert each.load.tolist() == [2 * steps, steps, steps, 0]
    for each in ranks:
        with torch.no_grad():
            each.weight += 1e-3
        each(torch.eye(4)[[3]])
        assert each.choice_bias.tolist() == pytest.approx([-0.01, 0.0, 0.0, 0.01])
        assert each.own_load.tolist() == each.load.tolist() == [0, 0, 0, 1]


def test_balancing_balances() -> None:
    torch.manual_seed(0)
    one = gate(num_experts=8, k=2, bias_update_rate=0.01, scores="sigmoid", drop_tokens=False)
    x = torch.randn(400, 16) + 1.0  # what all tokens share makes some experts everybody's choice
    first = one(x).exp_counts
    for _ in range(100):
        with torch.no_grad():
            one.weight *= 1.0001
        last = one(x).exp_counts
    assert first.max() > 2 * 100
    assert last.max() < 1.3 * 100


def test_the_bias_stays_in_fp32() -> None:
    one = gate(k=4, bias_update_rate=0.001)
    one.choice_bias.fill_(0.123456)
    one.bfloat16()
    assert one.weight.dtype == torch.bfloat16
    assert one.choice_bias.dtype == torch.float32
    assert one.choice_bias[0].item() == pytest.approx(0.123456, abs=1e-8)


def test_logits_are_fp32_also_under_autocast() -> None:
    one = gate(k=4)
    x = x_of()
    plain = one(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = one(x)
    assert torch.equal(plain.weights, cast.weights)
    assert plain.weights.dtype == torch.float32
    assert one.bfloat16()(x.bfloat16()).weights.dtype == torch.float32
