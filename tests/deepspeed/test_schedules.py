"""DeepSpeed's schedules: what is printed, what runs, and DeepSpeed's own."""

from typing import Any

import pytest
import torch

from offload.deepspeed.schedules import Schedule
from offload.tiers.errors import ConfigError

STEPS = 30
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_min_ratio": 0.1}),
]  # fmt: skip


def adam() -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.AdamW([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.05}], lr=0.1)


def numbers(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        rates.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        scheduler.step()
    return rates


def running(kind: str, params: dict[str, Any]) -> list[Any]:
    optimizer = adam()
    return numbers(optimizer, Schedule.of(kind, params).on(optimizer))


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_the_printed_code_is_what_runs(kind: str, params: dict[str, Any]) -> None:
    optimizer = adam()
    names: dict[str, Any] = {"optimizer": optimizer}
    exec(Schedule.of(kind, params).code(), names)
    assert numbers(optimizer, names["scheduler"]) == running(kind, params)


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_it_is_deepspeeds(kind: str, params: dict[str, Any]) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    optimizer = adam()
    expected = numbers(optimizer, getattr(theirs, kind)(optimizer, **params))
    actual = running(kind, params)
    for there, here in zip(expected, actual, strict=True):
        for (lr, betas), (actual_lr, actual_betas) in zip(there, here, strict=True):
            assert actual_lr == pytest.approx(lr, rel=1e-12, abs=1e-18)
            assert actual_betas == pytest.approx(betas)


def test_warmup_holds_the_first_two_steps_as_deepspeed_does() -> None:
    params = {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
    rates = [step[0][0] for step in running("WarmupLR", params)]
    assert rates[:7] == pytest.approx([0, 0, 0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "greater than or equal to 1"),
        ("WarmupLR", {"warmup_type": "cubic"}, "expected .log. or .linear."),
        ("WarmupLR", {"warmup_max_lr": "high"}, "expected a valid number"),
        ("WarmupDecayLR", {}, "total_num_steps: missing"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "expected a valid number"),
        ("OneCycle", {"cycle_min_lr": 1}, r"torch\.optim\.lr_scheduler in code"),
    ],
)
def test_what_is_refused(kind: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule.of(kind, params)
