"""`print(engine.report())` is for people."""

from __future__ import annotations

from pathlib import Path

import offload
from tests.offload.engine_cases import MARKS, NVME, TinyLM, batches, config, losses_of, seeded

pytestmark = MARKS


def test_a_report_reads_as_lines(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, NVME, clip_grad_norm=1.0)) as engine:
        assert "steps   0, 0 skipped" in str(engine.report())
        losses_of(engine, batches(2))
        engine.settle()
        report = engine.report()
    text = str(report)
    assert f"steps   2, 0 skipped, gradient norm {report.gradient_norm:.4g}" in text
    assert "nvme write " in text
    for name, tier in report.tiers.items():
        assert (f"{name:<7} " in text) == (tier.budget_nbytes > 0)
    assert text.count("\n") < 8
