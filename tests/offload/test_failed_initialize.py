"""`offload.initialize` that fails in the middle gives back threads, files and hooks."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import offload
import offload.engine
import offload.memory.tier_manager
import offload.optimizers.optimizer
import offload.tiered_model
import offload.zero.step.runtime
from offload.errors import StateError
from tests.offload.engine_cases import MARKS, ON, TinyLM, batches, config, seeded

pytestmark = MARKS

KEYS: dict[str, Any] = {
    "placement": {
        "parameters": "nvme", "gradients": "host", "optimizer": "nvme",
        "activations": {"tier": "nvme"},
    },
    "budget": {"host": "32MiB", "nvme": "64MiB"},
}  # fmt: skip
BEFORE_WEIGHTS_LEAVE = {
    "the backend": (offload.memory.tier_manager, "open_backend"),
    "the store of blocks": (offload.memory.tier_manager, "BlockStore"),
    "the tier of activations": (offload.memory.tier_manager, "ActivationTier"),
    "the update buffers": (offload.memory.tier_manager.TierManager, "staging"),
    "the update queue": (offload.zero.step.runtime, "UpdateQueue"),
    "the stepper": (offload.zero.step.runtime, "Stepper"),
    "gradient handles": (offload.zero.step.runtime, "GradientHandles"),
}
AFTER = {
    "the first values": (offload.engine, "load_group"),
    "the optimizer": (offload.engine, "optimizer_class"),
    "saved activations": (offload.engine, "handle_activations"),
    "the hooks": (offload.zero.step.runtime.Runtime, "start"),
    "the refusal of wrappers": (offload.engine, "refuse_foreign_wrappers"),
}


class Broken(Exception):
    pass


def broken(*args: Any, **keys: Any) -> Any:
    raise Broken


def held() -> tuple[int, int, int]:
    """Open files, threads, and hooks on every optimizer."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    return files, threading.active_count(), len(offload.optimizers.optimizer._watched)


def fail(model: Any, keys: Any, owner: object, name: str, patch: pytest.MonkeyPatch) -> None:
    before = held()
    with patch.context() as patched:
        patched.setattr(owner, name, broken)
        with pytest.raises(Broken):
            offload.initialize(model, keys)
    # an engine that an earlier test dropped may have ended meanwhile
    assert all(now <= then for now, then in zip(held(), before, strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", BEFORE_WEIGHTS_LEAVE)
def test_the_model_is_as_it_was(tmp_path: Path, monkeypatch: Any, what: str) -> None:
    model, keys = seeded(TinyLM).to(ON), config(tmp_path, **KEYS)
    fail(model, keys, *BEFORE_WEIGHTS_LEAVE[what], monkeypatch)
    loss = model.loss(batches(1)[0]).item()
    with offload.initialize(model, keys):
        assert model.loss(batches(1)[0]).item() == loss


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", AFTER)
def test_the_model_is_closed(tmp_path: Path, monkeypatch: Any, what: str) -> None:
    model, keys = seeded(TinyLM).to(ON), config(tmp_path, **KEYS)
    fail(model, keys, *AFTER[what], monkeypatch)
    with pytest.raises(StateError, match="closed"):
        model.loss(batches(1)[0])
    with pytest.raises(StateError, match="build it anew"):
        offload.initialize(model, keys)
