"""Weights alone in their tiers: nothing of a trainer is there."""

import subprocess
import sys

import pytest

TRAINER = [
    "block_state", "chunks", "deferred_updates", "device_update", "gradient_handles",
    "gradient_hooks", "gradient_paths", "gradients", "optimizer_state", "rank_work", "records",
    "recompute", "reduction", "runtime", "stepper", "update", "values",
]  # fmt: skip


@pytest.mark.slow
def test_the_store_imports_nothing_of_a_trainer() -> None:
    code = (
        "import sys, offload.zero.groups.store, offload.zero.groups.weight_values;"
        "print(*sorted(name.rpartition('.')[2] for name in sys.modules"
        " if name.startswith('offload.zero.')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    there = ended.stdout.split()
    assert "store" in there
    assert not set(there) & set(TRAINER)
