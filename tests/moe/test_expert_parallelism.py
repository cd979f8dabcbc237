"""Experts spread over ranks compute and learn what they do on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.moe import MoE
from tests.moe.parallel_programs import (
    EXPERTS,
    WIDTH,
    Steps,
    alone,
    errors,
    expert,
    load_and_save,
    net,
    run_cases,
    warnings,
    x_of,
)
from tests.ranks.processes import run_ranks

EXACT: dict[str, Any] = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({"k": 1, "capacity_factor": 0.7, "min_capacity": 0}, [20, 20]),
    ({"k": 2, "capacity_factor": 0.7, "noisy_gate_policy": "Jitter"}, [20, 20]),
    ({**EXACT, "k": 1, "frozen": True, "autocast": True}, [1, 0]),  # a rank without tokens
    ({"k": 2, "recompute": "yes"}, [20, 20]),
    ({"k": 1, "recompute": "yes", "frozen": True}, [1, 3]),
    ({"k": 3, "drop_tokens": False, "use_residual": True}, [20, 7]),
    ({"k": 2, "recompute": "reentrant"}, [20, 20]),
]
FEW = 4  # of the cases, unless --long


def merged(ranks: list[Steps], which: str) -> list[dict[str, Tensor | None]]:
    """The values of all ranks, by name; those that several ranks have are equal."""
    steps = [[each[2]] if which == "state" else each[1] for each in ranks]
    result: list[dict[str, Tensor | None]] = []
    for per_rank in zip(*steps, strict=True):
        together: dict[str, Tensor | None] = {}
        for mine in per_rank:
            for name, value in mine.items():
                if name in together:
                    assert same(together[name], value, 0.0), name
                together[name] = value
        result.append(together)
    return result


def same(a: Tensor | None, b: Tensor | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_same(
    actual: list[dict[str, Tensor | None]], expected: list[dict[str, Tensor | None]]
) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            assert same(mine[name], other[name], 1e-6), name


def test_two_ranks_learn_what_they_do_with_all_experts_each(tmp_path: Path, long: bool) -> None:
    some = CASES if long else CASES[:FEW]
    cases = [({**options, "ep_size": ep}, tokens, 0.1) for options, tokens in some for ep in (1, 2)]
    ranks = run_ranks(2, tmp_path, run_cases, cases)
    for number in range(0, len(cases), 2):
        one, two = ([rank[number + ep] for rank in ranks] for ep in (0, 1))
        for rank in range(2):
            for mine, other in zip(two[rank][0], one[rank][0], strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
        assert_same(merged(two, "gradients"), merged(one, "gradients"))
        if cases[number][1] == [1, 0]:  # an expert for each layer
            given = [n for n, g in merged(two, "gradients")[0].items() if g is not None]
            assert len({n[: len("layers.0.experts.0")] for n in given if "experts" in n}) == 2
        assert_same(merged(two, "state"), merged(one, "state"))
        names = [name for name in two[1][2] if "layers.0.experts" in name]
        assert {int(name.split(".")[3]) for name in names} == {4, 5, 6, 7}


def test_ranks_learn_what_one_process_does(tmp_path: Path, long: bool) -> None:
    if not long:
        pytest.skip("four processes: --long; two are enough for most of it")
    tokens = [20, 7, 0, 11]  # two ranks have the same experts
    ranks = run_ranks(4, tmp_path, run_cases, [({**EXACT, "ep_size": 2}, tokens, 0.0)])
    steps = [rank[0] for rank in ranks]
    expected = alone(EXACT, tokens)
    assert_same(merged(steps, "gradients"), expected[1])
    for step, output in enumerate(expected[0]):
        joined = torch.cat([each[0][step] for each in steps])
        torch.testing.assert_close(joined, output, rtol=1e-6, atol=1e-6)


def test_states_load_at_another_ep_size(tmp_path: Path) -> None:
    torch.manual_seed(7)
    whole = net(k=2, top2_2nd_expert_sampling=False)
    for param in whole.parameters():
        torch.nn.init.normal_(param)
    ranks = run_ranks(2, tmp_path, load_and_save, whole.state_dict())
    together: dict[str, Tensor] = {}
    for rank, (missing, state, output) in enumerate(ranks):
        assert missing == []
        together |= state
        torch.testing.assert_close(output, whole(x_of(rank, 5))[0], rtol=1e-5, atol=1e-4)
    back = net(k=2, top2_2nd_expert_sampling=False)
    back.load_state_dict(together)
    for name, value in whole.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


def test_sizes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, errors):
        assert "ConfigError: MoE: ep_size is 3, and 8 experts do not divide" in said[0]
        assert "ConfigError: MoE: ep_size is 4, and 2 ranks do not divide" in said[1]
        assert "ConfigError: MoE: ep_size is 0" in said[2]
        assert "ConfigError: MoE: ep_size is 16, and 8 experts" in said[3]
        assert "DistributedDataParallel makes the experts of all ranks equal" in said[4]
        assert "layers.0.experts.8.0.weight" in said[5]
    with pytest.raises(ConfigError, match="no process group"):
        MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=2)


def test_a_loop_without_an_engine_is_told_once_per_layer_to_average(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, warnings):
        assert said[0] == "training"
        assert len(said) == 3
        assert "nothing averages gradients over ranks; use offload.initialize" in said[1]
