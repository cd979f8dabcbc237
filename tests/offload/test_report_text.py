"""`print(engine.report())` is for people."""

from __future__ import annotations

from pathlib import Path

import torch

import offload
from offload.tiers.units import format_bytes
from tests.offload.engine_cases import HOST, MARKS, NVME, TinyLM, batches, config, losses_of, seeded

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
    assert text.count("\n") < 9


def test_a_report_says_what_the_ram_of_the_process_consists_of(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as engine:
        before = engine.report().process
        kept = torch.ones(12 << 20)  # beside the tiers
        after = engine.report().process
        touched = engine.report().tiers["host"].used_nbytes
    for seen in (before, after):
        parts = (seen.tiers_nbytes, seen.heap_nbytes, seen.holes_nbytes, seen.libraries_nbytes)
        assert sum(parts) + seen.other_nbytes == seen.rss_nbytes <= seen.peak_nbytes
        assert min(*parts, seen.other_nbytes) >= 0
        assert seen.tiers_nbytes >= touched
        assert seen.libraries_nbytes > 20 << 20
    grown = after.heap_nbytes - before.heap_nbytes
    assert abs(grown - kept.nbytes) < 4 << 20
    assert f"heap (tensors beside the tiers) {format_bytes(after.heap_nbytes)}" in str(after)
