"""The result of training does not depend on where anything lives, to the last bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offload
from tests.aio import WHY_NO_LIBAIO
from tests.offload.engine_cases import (
    DEVICE,
    DEVICE_BUDGET,
    HOST,
    MARKS,
    NVME,
    ON,
    TinyLM,
    batches,
    config,
    min_budget,
    seeded,
)
from tests.offload.engine_states import assert_same_bits, losses_of, parameters_of, states_of

pytestmark = MARKS
STEPS = 8
Run = tuple[list[float], dict[str, Tensor]]

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": DEVICE,
    "host": HOST,
    "nvme": NVME,
    "mixed": {
        "parameters": {"host": "50%", "nvme": "50%"},
        "gradients": {"host": "30%", "nvme": "70%"},
        "optimizer": {"host": "40%", "nvme": "60%"},
    },
    "three tiers": {
        "parameters": {"device": "30%", "host": "30%", "nvme": "40%"},
        "gradients": "nvme",
        "optimizer": {"device": "20%", "host": "20%", "nvme": "60%"},
    },
    "optimizer on nvme": {"parameters": "host", "gradients": "host", "optimizer": "nvme"},
    "parameters on nvme": {"parameters": "nvme", "gradients": "host", "optimizer": "host"},
}


def train(keys: dict[str, Any], accumulate: int) -> Run:
    with offload.initialize(seeded(TinyLM), keys) as engine:
        losses = losses_of(engine, batches(STEPS * accumulate), accumulate)
        states = states_of(engine)
        engine.check_integrity()
        for tier, report in engine.report().tiers.items():
            assert report.peak_nbytes <= report.budget_nbytes, tier
        return losses, states


def numbers(precision: str, accumulate: int, clip: bool) -> dict[str, Any]:
    """The keys that decide the result."""
    return {
        "precision": precision,
        "gradient_accumulation_steps": accumulate,
        "clip_grad_norm": 0.5 if clip else None,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    }


@functools.cache
def reference(folder: Path, precision: str, accumulate: int, clip: bool) -> Run:
    """All on the host, nothing fetched ahead."""
    keys = numbers(precision, accumulate, clip) | {"prefetch": 0}
    return train(config(folder, HOST, **keys), accumulate)


AIO = "threads" if WHY_NO_LIBAIO else "libaio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("swap")
    reference.cache_clear()


@given(
    placement=st.sampled_from(sorted(PLACEMENTS)),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    accumulate=st.sampled_from([1, 3]),
    prefetch=st.sampled_from([0, "auto", 8]),
    chunk=st.sampled_from([2048, 4096, "auto"]),
    tight=st.booleans(),
    backend=st.sampled_from(["threads", AIO]),
    clip=st.booleans(),
    in_backward=st.booleans(),
    activations=st.sampled_from([("device", False), ("nvme", False), ("nvme", True),
                                 ("device", "selective"), ("nvme", "selective")]),
)  # fmt: skip
# the corners that a drawing could leave out
@example("nvme", "bf16", 1, 8, 2048, True, AIO, True, False, ("device", False))
@example("nvme", "fp16", 3, "auto", 2048, True, "threads", True, False, ("device", False))
@example("three tiers", "fp32", 3, 8, 4096, True, "threads", False, True, ("device", False))
@example("mixed", "bf16", 3, 0, 2048, False, AIO, False, True, ("device", False))
@example("host", "bf16", 1, "auto", "auto", False, "threads", False, True, ("nvme", True))
@example("nvme", "fp32", 1, 0, 2048, True, "threads", False, True, ("device", False))
def same_bits(
    folder: Path, placement: str, precision: str, accumulate: int, prefetch: Any, chunk: Any,
    tight: bool, backend: str, clip: bool, in_backward: bool, activations: tuple[str, Any],
) -> None:  # fmt: skip
    homes = PLACEMENTS[placement]
    if precision != "fp32" and accumulate > 1:  # sums in fp32 are refused on nvme
        homes = {**homes, "gradients": "host"}
    keys = config(folder, homes, **numbers(precision, accumulate, clip))
    ahead = in_backward and not clip and precision != "fp16"
    keys["optimizer"] = {**keys["optimizer"], "chunk": chunk, "in_backward": ahead}
    keys["nvme"] = {**keys["nvme"], "backend": backend}
    keys["prefetch"] = prefetch
    tier, checkpoint = activations
    keys["placement"] = {
        **keys["placement"], "activations": {"tier": tier, "checkpoint": checkpoint}
    }  # fmt: skip
    if tight:
        keys["budget"] = min_budget(TinyLM, keys)
    elif tier == "nvme":
        keys["budget"] = {**DEVICE_BUDGET, "host": "32MiB", "nvme": "64MiB"}
        event(f"host budget {keys['budget']['host']}")

    losses, states = train(keys, accumulate)

    expected_losses, expected_states = reference(folder, precision, accumulate, clip)
    assert losses == expected_losses
    assert_same_bits(states, expected_states)


def test_no_placement_budget_chunk_prefetch_or_backend_changes_a_bit(
    folder: Path, long: bool
) -> None:
    drawn = settings(
        derandomize=True, max_examples=25 if long else 3, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    drawn(same_bits)(folder)


def test_the_reference_of_the_parity_test_learns_and_clips(folder: Path) -> None:
    losses, _ = reference(folder, "fp32", 1, False)
    clipped, _ = reference(folder, "fp32", 1, True)
    assert len(losses) == STEPS
    assert losses[0] == clipped[0]
    assert losses != clipped
    assert len(set(losses)) == STEPS


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def scheduled_losses(
    model: Any, optimizer: torch.optim.Optimizer, accumulate: int, clip: float | None = None
) -> list[float]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
    losses = []
    for number, tokens in enumerate(batches(STEPS * accumulate), 1):
        loss = model.loss(tokens)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.sample(3)
@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fp32_agrees_with_plain_adamw_to_rounding(
    folder: Path, placement: str, accumulate: int
) -> None:
    keys = config(
        folder, PLACEMENTS[placement], clip_grad_norm=0.5, gradient_accumulation_steps=accumulate,
        optimizer={"lr": 2e-3, "betas": (0.9, 0.95), "chunk": 2048},
    )  # fmt: skip
    model = seeded(TinyLM)
    with offload.initialize(model, keys, parameters=param_groups(model)) as engine:
        losses = scheduled_losses(model, engine.optimizer, accumulate)
        trained = parameters_of(engine)
    plain = seeded(TinyLM).to(ON)
    optimizer = torch.optim.AdamW(param_groups(plain), lr=2e-3, betas=(0.9, 0.95))
    expected_losses = scheduled_losses(plain, optimizer, accumulate, clip=0.5)
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, value in trained.items():
        distance = (value.cpu() - expected[name].cpu()).norm() / expected[name].cpu().norm()
        assert distance <= 1e-6, (name, distance.item())
