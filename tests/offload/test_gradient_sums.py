"""Sums of 16-bit gradients are kept in fp32, in memory and never in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

import offload
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    gradients_of,
    seeded,
)

pytestmark = MARKS


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_second_pass_that_was_not_planned_sums_in_host_memory(
    tmp_path: Path, precision: str
) -> None:
    def gradients(placement: dict[str, str]) -> dict[str, object]:
        model = seeded(TinyLM)
        with offload.initialize(model, config(tmp_path, placement, precision=precision)) as engine:
            for tokens in batches(2):
                engine.backward(model.loss(tokens))
            engine.settle()
            engine.check_integrity()
            nvme = engine.report().tiers.get("nvme")
            assert nvme is None or not nvme.by_class.get("gradients")
            return gradients_of(engine)  # type: ignore[return-value]

    assert_same_bits(gradients(NVME), gradients(HOST))  # type: ignore[arg-type]
