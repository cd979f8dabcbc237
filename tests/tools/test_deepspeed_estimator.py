"""The estimator in DeepSpeed's manner prints DeepSpeed's own figures.

Every number below was printed by the functions of DeepSpeed 0.19.8 (`estimate_zero2_...` and
`estimate_zero3_model_states_mem_needs`); over 6,000 drawn setups of 8 options each both agree, too.
"""

from __future__ import annotations

import pytest

from offload.tiers.errors import ConfigError
from offload.tools.memest.systems.deepspeed_estimator import estimate, lines
from offload.tools.memest.systems.subject import Ranks

# (parameters, largest layer, GPUs per node, nodes): rows of (RAM, GPU) in bytes
ZERO2 = {
    (7e9, 1.3e8, 1, 1): [(168000000000, 14000000000), (42000000000, 140000000000)],
    (7e9, 1.3e8, 8, 4): [(1344000000000, 14000000000), (336000000000, 17937500000)],
    (2851000000, 32000000, 8, 1): [(136848000000, 5702000000), (136848000000, 12116750000)],
    (13000000001, 205000001, 3, 2): [(468000000036, 26000000002), (234000000018, 65000000005)],
    (175e9, 617e6, 16, 64): [
        (1075200000000000, 350000000000), (16800000000000, 353076171875),
    ],
}  # fmt: skip
ZERO3 = {
    (7e9, 1.3e8, 1, 1): [
        (189000000000, 520000000), (189000000000, 520000000),
        (168000000000, 14520000000), (168000000000, 14520000000),
        (780000000, 126520000000), (42000000000, 126520000000),
    ],
    (7e9, 1.3e8, 8, 4): [
        (47250000000, 520000000), (336000000000, 520000000),
        (42000000000, 957500000), (336000000000, 957500000),
        (6240000000, 4457500000), (336000000000, 4457500000),
    ],
    (2851000000, 32000000, 8, 1): [
        (76977000000, 128000000), (136848000000, 128000000),
        (68424000000, 840750000), (136848000000, 840750000),
        (1536000000, 6542750000), (136848000000, 6542750000),
    ],
    (13000000001, 205000001, 3, 2): [
        (175500000013, 820000004), (234000000018, 820000004),
        (156000000012, 5153333337), (234000000018, 5153333337),
        (3690000018, 39820000007), (234000000018, 39820000007),
    ],
    (175e9, 617e6, 16, 64): [
        (73828125000, 2468000000), (16800000000000, 2468000000),
        (65625000000, 2809796875), (16800000000000, 2809796875),
        (59232000000, 5544171875), (16800000000000, 5544171875),
    ],
    # one bit of rounding: the order of multiplications matters
    (77218816899, 1, 1, 7): [
        (297844008039, 4), (463312901394, 4),
        (264750229368, 22062519118), (463312901394, 22062519118),
        (6, 198562672030), (463312901394, 198562672030),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", ZERO2, ids=str)
def test_zero2_agrees_to_the_byte(case: tuple[float, float, int, int]) -> None:
    numel, layer, gpus, nodes = case
    needs = estimate(2, numel, layer, Ranks(gpus, nodes))
    assert [(each.host_nbytes, each.gpu_nbytes) for each in needs] == ZERO2[case]


@pytest.mark.parametrize("case", ZERO3, ids=str)
def test_zero3_agrees_to_the_byte(case: tuple[float, float, int, int]) -> None:
    numel, layer, gpus, nodes = case
    needs = estimate(3, numel, layer, Ranks(gpus, nodes))
    assert [(each.host_nbytes, each.gpu_nbytes) for each in needs] == ZERO3[case]


def test_seven_billion_parameters_on_one_gpu_read_as_deepspeed_prints_them() -> None:
    zero3 = lines(3, estimate(3, 7e9, 1.3e8, Ranks()))
    zero2 = lines(2, estimate(2, 7e9, 1.3e8, Ranks()))
    assert "176.02 GiB RAM" in zero3[0]
    assert " 0.48 GiB per GPU" in zero3[0]
    assert "156.46 GiB RAM" in zero2[0]
    assert "13.04 GiB per GPU" in zero2[0]


def test_options_come_in_deepspeeds_order_and_words() -> None:
    options = [each.options for each in estimate(3, 7e9, 1.3e8, Ranks())]
    assert options[0] == "offload_param=cpu , offload_optimizer=cpu , zero_init=1"
    assert options[-1] == "offload_param=none, offload_optimizer=none, zero_init=0"
    assert len(set(options)) == 6


@pytest.mark.parametrize(
    ("stage", "numel", "layer", "ranks"),
    [
        (1, 7e9, 1e8, Ranks()), (3, -7e9, 1e8, Ranks()), (3, 7e9, 8e9, Ranks()),
        (2, 7e9, 1e8, Ranks(per_node=0)), (2, 7e9, 1e8, Ranks(nodes=0)),
    ],
)  # fmt: skip
def test_sizes_that_are_none_are_refused(
    stage: int, numel: float, layer: float, ranks: Ranks
) -> None:
    with pytest.raises(ConfigError):
        estimate(stage, numel, layer, ranks)
