"""Text that a model generates on the GPU from its tiers: the bits that it has where all of its
weights lie in the GPU's memory.

    parameters     weights at home on device, host, nvme and in parts on all three
    int4           the same with codes, which are decoded on the device: the bits of the model that
                   computes with the decoded values
    kv             keys and values at home on device, host and nvme; in int8, those of each other

A small Llama of transformers, in bf16, generates greedily; logits are compared, not only tokens.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks.generation import from_shape
from benchmarks.gpu_first import Checks
from offload.process.child import Parent
from offload.tiers import accelerator
from offload.tiers.tier import Tier

_PARTS = {"device": "30%", "host": "30%", "nvme": "40%"}
_ROWS, _PROMPT, _TOKENS = 3, 7, 6
_SHORT, _ROOMY = "4MiB", "16MiB"  # of the device; the weights are 5 MiB
_KV_TOKENS = 64


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
