"""A mixture of experts beside a dense model: `benchmarks/mixture.py`, two steps of each."""

from __future__ import annotations

from benchmarks.mixture import DENSE, EXAMPLES, LONGER, MIXTURE, measure, page_of
from offload.config import OffloadConfig

TINY = [
    "train.model.layers=1", "train.model.hidden=32", "train.model.heads=2", "train.steps=2",
    "train.evaluate_every=1", "train.evaluate_batches=1", "train.batch=1", "train.sequence=8",
]  # fmt: skip


def test_the_examples_have_equal_compute_per_token_and_equal_training() -> None:
    mixture, dense = (OffloadConfig.load(EXAMPLES / n) for n in ("moe.yaml", "moe-dense.yaml"))
    assert mixture.train.model.active_numel == dense.train.model.numel
    assert mixture.optimizer == dense.optimizer
    same = {"model": None}
    assert mixture.train.model_copy(update=same) == dense.train.model_copy(update=same)


def test_the_dense_model_is_compared_at_equal_steps_and_at_equal_seconds() -> None:
    record = measure(TINY)
    assert [row.name for row in record.rows] == [MIXTURE, DENSE, LONGER]
    steps = [row.facts["steps"] for row in record.rows]
    assert steps[:2] == [2, 2]
    assert steps[2] == max(1, round(2 * record.details["step_ratio"]))
    for row in record.rows:
        assert row.facts["validation_loss"] == record.details[row.name]["validation_losses"][-1]
    text = page_of(record)
    assert text.count("<svg") >= 4
    assert all(f"{row.facts['validation_loss']:.4f}" in text for row in record.rows)
