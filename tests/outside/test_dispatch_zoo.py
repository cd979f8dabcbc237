"""Every causal language model of transformers that builds from a tiny configuration generates from
the tiers, greedily, the tokens and logits that it generates in RAM, to the bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from tests.offload.engine_cases import bits
from tests.outside.test_causal_lm_zoo import (
    NAMES,
    _quiet_and_one_thread,  # noqa: F401 - a fixture
    build,
)

PLACEMENTS: dict[str, Any] = {
    "host": "host", "nvme": "nvme", "mixed": {"host": "50%", "nvme": "50%"},
}  # fmt: skip
LEAST_EQUAL = 120  # of the 178 that transformers 5.17 has
LEAST_EQUAL_OF_SAMPLE = 4  # every twentieth one, without --long
SAMPLE = 20

outcomes: Counter[str] = Counter()
reasons: dict[str, str] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swap")


def made(model_type: str) -> Any:
    return build(model_type).eval()


def generated(model: Any, tokens: Tensor) -> tuple[list[list[int]], list[bytes]]:
    """New tokens, and the logits that they were chosen from."""
    torch.manual_seed(1)
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, min_new_tokens=3,
        do_sample=False, use_cache=True, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return found.sequences.tolist(), [bits(each) for each in found.logits]


@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_tokens_and_logits_are_those_in_ram(model_type: str, folder: Path, long: bool) -> None:
    if not long and sorted(NAMES).index(model_type) % SAMPLE != SAMPLE // 2:
        outcomes["left to --long"] += 1
        pytest.skip("every twentieth architecture: --long has all")
    tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(2))
    try:
        expected = generated(made(model_type), tokens)
    except Exception as error:  # noqa: BLE001 - whatever keeps it from generating in RAM
        outcomes["does not build or generate in RAM"] += 1
        reasons[model_type] = f"{type(error).__name__}: {error}".split("\n")[0][:90]
        pytest.skip(reasons[model_type])
    outcomes["built"] += 1
    for parameters in PLACEMENTS.values():
        model = offload.dispatch(
            made(model_type),
            {
                "device": "cpu", "placement": {"parameters": parameters},
                "budget": {"host": "64MiB", "nvme": "256MiB"}, "nvme": {"paths": [str(folder)]},
            },
        )  # fmt: skip
        with offload.dispatched(model) as dispatched:
            assert generated(model, tokens) == expected, parameters
            dispatched.check_integrity()
    outcomes["equal"] += 1


def test_enough_architectures_were_compared() -> None:
    """Runs last: fails when architectures stop building, whatever the reason."""
    print(dict(outcomes))
    if outcomes.total() < len(NAMES):
        pytest.skip("only part of the architectures was selected")
    least = LEAST_EQUAL_OF_SAMPLE if outcomes["left to --long"] else LEAST_EQUAL
    assert outcomes["equal"] >= least, reasons
