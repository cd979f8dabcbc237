"""The first minute of `make gpu-check`, with the CPU in the GPU's place: what is right passes, and
what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_bits
from benchmarks.gpu_bits import (
    Checks,
    StepChecks,
    Tiny,
    copied_and_back,
)
from benchmarks.gpu_parts import failed_checks
from offload.swap.device.streams import CopyStream
from offload.tiers.tier import Tier
from tests.kernels import triton_device
from tests.kernels.triton_device import DEVICE, launches

__all__ = ["launches"]
pytestmark = triton_device.MARKS

WHERE = torch.device(DEVICE)


class Answers(list[dict[str, Any]]):
    """What a parent is told."""

    answer = list.append


@pytest.mark.slow
def test_what_is_copied_there_and_back_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copied_and_back(WHERE) == ""
    copy = CopyStream.copy

    def without_a_byte(self: CopyStream, to: Any, source: Any, after: Any = None) -> Any:
        return copy(self, to[1:], source[1:], after)

    monkeypatch.setattr(CopyStream, "copy", without_a_byte)
    assert copied_and_back(WHERE) == "what came back is not what was sent"


# ---------------------------------------------------------------- steps
def test_the_sums_of_the_tiny_model_are_exact_up_to_its_first_update() -> None:
    """In any order, and with any rounding to bf16 in between: bf16 has all whole numbers up to 256,
    and the absolute values of what is added come to no more."""
    model, low = Tiny(), Tiny().bfloat16()
    x, targets = Tiny.batch(0)
    seen = [x]
    for block in model.blocks:
        seen.append(block(seen[-1]))
        seen[-1].retain_grad()
    loss = (seen[-1] * targets).sum()
    loss.backward()
    gradients = []
    for block, before, after in zip(model.blocks, seen, seen[1:], strict=False):
        weight = block.weight
        assert isinstance(weight, torch.Tensor)
        assert after.grad is not None
        assert weight.grad is not None
        gradients.append(weight.grad)
        added = (
            before.abs() @ weight.abs().T, after.grad.abs() @ weight.abs(),
            after.grad.abs().T @ before.abs(),
        )  # fmt: skip
        for most, values in zip(added, (after, after.grad, weight.grad), strict=True):
            assert most.max() <= 256
            assert torch.equal(values, values.round())
    again = low(x.bfloat16(), targets)
    again.backward()
    assert again.item() == loss.item() != 0.0
    assert any(gradient.any() for gradient in gradients)
    for weight, expected in zip(low.parameters(), gradients, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad.float(), expected)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_steps_are_those_of_the_cpu(tier: Tier, tmp_path: Path) -> None:
    assert StepChecks(torch.device("cpu"), tmp_path).check(tier) == ""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("changed", "fragment"),
    [
        (lambda losses, weights: ([3.0, *losses[1:]], weights), "the first loss is 3.0, the CPU's"),
        (lambda losses, weights: (losses, [weights[0] + 1, *weights[1:]]), "1 of 8 weights are"),
        (lambda losses, weights: ([*losses[:2], float("nan")], weights), "losses are not finite"),
        (lambda losses, weights: ([*losses[:2], 9.0], weights), "9.0], and ["),
    ],
)
def test_steps_that_differ_are_named(
    changed: Any, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = StepChecks(torch.device("cpu"), tmp_path)
    assert checks.check(Tier.HOST) == ""
    right = gpu_bits.take_steps(torch.device("cpu"), Tier.HOST, tmp_path)
    monkeypatch.setattr(gpu_bits, "take_steps", lambda *_: changed(*right))
    assert fragment in checks.check(Tier.NVME)


# ---------------------------------------------------------------- their record
def test_a_check_that_raises_is_named_and_the_others_go_on() -> None:
    told = Answers()
    checks = Checks(told)  # type: ignore[arg-type]
    checks.run("one", lambda: "")
    checks.run("two", lambda: str(1 // 0))
    checks.run("three", lambda: "a byte differs")
    assert failed_checks(told[-1]) == [
        "two: ZeroDivisionError: integer division or modulo by zero", "three: a byte differs",
    ]  # fmt: skip
    assert [each["at"] for each in told] == ["one", "", "two", "", "three", ""]
