"""Small checks by name, which show within a minute what fails on a GPU.

    pin, copy   memory is pinned as the host tier pins it, and copied to the device and back
    step        a tiny model with all of its states and activations on one tier. After one step its
                loss and its weights have the CPU's bits; the losses after it are those of the other
                tiers
    dispatch    the tiny model computes with its weights on one tier: the CPU's bits

Up to its first update all that the tiny model adds up are small whole numbers, so that no order of
additions and no tensor core changes a bit. After it, products are rounded as each device rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import offload
from offload.process.child import Parent
from offload.swap.device.streams import CopyStream
from offload.tiers import accelerator
from offload.tiers.memory import HostMemory
from offload.tiers.tier import Tier

_COPY_NBYTES = 16 << 20
_STEPS = 3


class Checks:
    """The results of the checks so far, sent to the parent after each, with the one under way."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._done: list[dict[str, Any]] = []

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Run `check`, which returns what is wrong, or an empty text."""
        self._parent.answer({"checks": self._done, "at": name})
        started = time.perf_counter()
        try:
            wrong = check()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the check's result
            wrong = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - started
        self._done.append({"name": name, "seconds": seconds, "wrong": wrong})
        self._parent.answer({"checks": self._done, "at": ""})


def run_first(options: Mapping[str, Any], parent: Parent) -> None:
    """Run the first checks, as a child's program."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else two runs may differ
    device = accelerator.default_device()
    checks, folder = Checks(parent), Path(options["folder"])
    checks.run("pin and copy, both ways", partial(copied_and_back, device))
    steps = StepChecks(device, folder)
    for tier in Tier:
        checks.run(f"step: {tier}", partial(steps.check, tier))
    for tier in Tier:
        checks.run(f"dispatch: {tier}", partial(dispatched, device, tier, folder))


# ---------------------------------------------------------------- pin and copy
def copied_and_back(device: torch.device) -> str:
    memory = HostMemory(2 * _COPY_NBYTES, pin_for=device)
    source, back = (memory.tensor(start, _COPY_NBYTES) for start in (0, _COPY_NBYTES))
    source.copy_(torch.arange(_COPY_NBYTES) % 251 + 1)  # memory that was never written holds zeros
    there = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device)
    to_device, to_host = CopyStream(device), CopyStream(device)
    arrived = to_device.copy(there, source)
    to_host.copy(back, there, after=[arrived]).wait()
    equal, pinned = torch.equal(back, source), memory.pinned
    for stream in (to_device, to_host):
        stream.close()
    memory.close()
    if not equal:
        return "what came back is not what was sent"
    return "" if pinned or not accelerator.is_accelerator(device) else "memory was not pinned"


# ---------------------------------------------------------------- steps
class Tiny(nn.Module):
    """A few products by sums of two signed permutations, of a few rows with one 1 each."""

    WIDTH, BLOCKS = 64, 8
    ROWS = 1024  # activations are large enough to be moved away
    EVERY = 16  # row is not 0

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(self.BLOCKS)
        )
        for weight in self.parameters():
            weight.data.zero_()
            for _ in range(2):
                columns = torch.randperm(self.WIDTH, generator=generator)
                weight.data[torch.arange(self.WIDTH), columns] += _signs(self.WIDTH, generator)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.float() * targets).sum()

    @classmethod
    def batch(cls, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number + 1)
        rows = torch.arange(0, cls.ROWS, cls.EVERY)
        x = torch.zeros(cls.ROWS, cls.WIDTH)
        x[rows, torch.randint(cls.WIDTH, rows.shape, generator=generator)] = 1.0
        return x, _signs(cls.ROWS * cls.WIDTH, generator).view(cls.ROWS, cls.WIDTH)


def _signs(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (numel,), generator=generator) * 2.0 - 1.0


def settings(device: torch.device, tier: Tier, folder: Path) -> dict[str, Any]:
    """A configuration with all states and activations on one tier; the device holds few blocks."""
    states = dict.fromkeys(("parameters", "gradients", "optimizer"), str(tier))
    return {
        "device": device.type, "precision": "bf16", "clip_grad_norm": 1.0,
        "budget": {
            "device": "16MiB" if tier is Tier.DEVICE else "100KiB", "host": "64MiB",
            "nvme": "64MiB",
        },
        "nvme": {"paths": [str(folder)]},
        "placement": {**states, "activations": {"tier": str(tier)}},
        "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1},
    }  # fmt: skip


def take_steps(device: torch.device, tier: Tier, folder: Path) -> tuple[list[float], list[Tensor]]:
    """The losses, and the weights after the first step."""
    with tempfile.TemporaryDirectory(dir=folder) as private:
        engine = offload.initialize(Tiny(), settings(device, tier, Path(private)))
        losses, weights = list[float](), list[Tensor]()
        for number in range(_STEPS):
            x, targets = (each.to(engine.device) for each in Tiny.batch(number))
            loss = engine.module(x.bfloat16(), targets)
            loss.backward()
            losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if number == 0:
                for weight in engine.module.parameters():
                    with engine.gathered(weight):
                        weights.append(weight.detach().cpu().clone())
        engine.settle()
        engine.check_integrity()
        engine.close()
    return losses, weights


class StepChecks:
    """Compares the steps on each tier with those of the CPU, and with the tiers before it."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device, self._folder = device, folder
        self._expected: tuple[list[float], list[Tensor]] | None = None
        self._losses: list[float] | None = None

    def check(self, tier: Tier) -> str:
        if self._expected is None:
            self._expected = take_steps(torch.device("cpu"), Tier.HOST, self._folder)
        losses, weights = take_steps(self._device, tier, self._folder)
        expected, of_the_cpu = self._expected
        if losses[0] != expected[0]:
            return f"the first loss is {losses[0]}, the CPU's {expected[0]}"
        wrong = [not torch.equal(*pair) for pair in zip(weights, of_the_cpu, strict=True)]
        if any(wrong):
            return f"{sum(wrong)} of {len(wrong)} weights are not the CPU's after one step"
        if not np.isfinite(losses).all():
            return f"losses are not finite: {losses}"
        if self._losses is None:
            self._losses = losses
        if losses != self._losses:
            return f"losses are {losses}, and {self._losses} on {next(iter(Tier))}"
        return ""


# ---------------------------------------------------------------- a model that does not train
def dispatched(device: torch.device, tier: Tier, folder: Path) -> str:
    """The error in passes of a model that `offload.dispatch` spreads; empty if there is none."""
    x, targets = Tiny.batch(0)
    expected = Tiny().bfloat16()(x.bfloat16(), targets).item()
    with tempfile.TemporaryDirectory(dir=folder) as private, torch.no_grad():
        keys = settings(device, tier, Path(private))
        model = offload.dispatch(Tiny(), {**keys, "placement": {"parameters": str(tier)}})
        with offload.dispatched(model) as owner:
            passes = [model(x.bfloat16().to(device), targets.to(device)) for _ in range(_STEPS)]
            owner.check_integrity()
    found = [each.item() for each in passes]
    return "" if found == [expected] * _STEPS else f"losses are {found}, the CPU's {expected}"
