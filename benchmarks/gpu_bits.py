"""Checks by name of what the GPU computes from the tiers, bit for bit.

The first ones show within a minute what fails at all:

    pin, copy   memory is pinned as the host tier pins it, and copied to the device and back
    step        a tiny model with all of its states and activations on one tier. After one step its
                loss and its weights have the CPU's bits; the losses after it are those of the other
                tiers

Up to its first update all that the tiny model adds up are small whole numbers, so that no order of
additions and no tensor core changes a bit. After it, products are rounded as each device rounds.

Then a small Llama of transformers generates greedily, in bf16. Logits are compared with those that
it has where all of its weights lie in the GPU's memory:

    parameters  weights at home on device, host, nvme and in parts on all three
    int4        the same with codes, which are decoded on the device: the bits of the model that
                computes with the decoded values
    kv          keys and values at home on device, host and nvme; in int8, those of each other
"""

from __future__ import annotations

import copy
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
from benchmarks.generation import from_shape
from offload.process.child import Parent
from offload.swap.device.streams import CopyStream
from offload.tiers import accelerator
from offload.tiers.memory import HostMemory
from offload.tiers.tier import Tier

_COPY_NBYTES = 16 << 20
_STEPS = 3
_PARTS = {"device": "30%", "host": "30%", "nvme": "40%"}
_ROWS, _PROMPT, _TOKENS = 3, 7, 6
_SHORT, _ROOMY = "4MiB", "16MiB"  # of the device; the weights are 5 MiB
_KV_TOKENS = 64


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


# ---------------------------------------------------------------- generated text
def run_inference(options: Mapping[str, Any], parent: Parent) -> None:
    """Run the checks of generation, as a child's program."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else two runs may differ
    generation = Generation(accelerator.default_device(), Path(options["folder"]))
    checks = Checks(parent)
    for name, check in generation.checks().items():
        checks.run(name, check)


class Generation:
    """The output of one model, with its weights and its cache in various places."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device, self._folder = device, folder
        torch.manual_seed(0)
        model: Any = from_shape("small")
        self._model: Any = model.requires_grad_(False)
        self._model.generation_config.eos_token_id = None  # all rows go on to the end
        generator = torch.Generator().manual_seed(1)
        shape = (_ROWS, _PROMPT)
        self._prompt = torch.randint(self._model.config.vocab_size, shape, generator=generator)
        self._expected: dict[str, list[torch.Tensor]] = {}

    def checks(self) -> dict[str, Callable[[], str]]:
        """The checks by name; each returns what is wrong, or an empty text."""
        found: dict[str, Callable[[], str]] = {
            f"generate: weights on {home}": partial(self.check, {"parameters": home})
            for home in (*map(str, Tier), _PARTS)
        }
        for tier in map(str, Tier):
            found[f"generate: int4 on {tier}"] = partial(self.check, {"parameters": tier}, "int4")
        for dtype in ("bf16", "int8"):
            for tier in map(str, Tier):
                placement = {"parameters": "host", "kv": tier}
                found[f"generate: keys and values in {dtype} on {tier}"] = partial(
                    self.check, placement, kv=dtype
                )
        return found

    def check(self, placement: Mapping[str, Any], storage: str = "", kv: str = "bf16") -> str:
        """The error in the generated text; empty if there is none."""
        found, decoded = self._generated(placement, storage, kv)
        what = f"{storage} {kv}"
        if what not in self._expected:  # of a cache in int8, what the first one gave
            self._expected[what] = found if kv == "int8" else self._plain(decoded)
        for step, pair in enumerate(zip(found, self._expected[what], strict=True)):
            if not torch.equal(*pair):
                far = (pair[0].double() - pair[1].double()).abs().max().item()
                return f"the logits of token {step} are not the same: up to {far:.3g} apart"
        return ""

    def _generated(
        self, placement: Mapping[str, Any], storage: str, kv: str
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """The logits; and the values of the weights, decoded, where they are in codes."""
        roomy = placement["parameters"] == "device" or placement.get("kv") == "device"
        config: dict[str, Any] = {
            "device": self._device.type, "placement": dict(placement),
            "budget": {
                "device": _ROOMY if roomy else _SHORT, "host": "64MiB", "nvme": "64MiB",
            },
        }  # fmt: skip
        if storage:
            config["storage"] = {"weights": storage}
        if "kv" in placement:
            config["kv"] = {"tokens": _KV_TOKENS, **({"dtype": kv} if kv == "int8" else {})}
        with tempfile.TemporaryDirectory(dir=self._folder) as private:
            config["nvme"] = {"paths": [private]}
            model = offload.dispatch(copy.deepcopy(self._model), config)
            with offload.dispatched(model) as owner:
                found = self._logits(model)
                owner.check_integrity()
                decoded = {name: value.clone() for name, value in model.state_dict().items()}
        return found, decoded

    def _plain(self, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The logits of the model with `values`, all of it on the device."""
        model = copy.deepcopy(self._model)
        model.load_state_dict(values)
        return self._logits(model.to(self._device))

    def _logits(self, model: Any) -> list[torch.Tensor]:
        found = model.generate(
            self._prompt.to(self._device), max_new_tokens=_TOKENS, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return [logits.cpu() for logits in found.logits]
