"""DeepSpeed ZeRO-3 with offload, driven through its public interface, as a peer of `step`.

One process, no MPI, on the CPU, with its defaults but for what has to be otherwise for this model
to train from nvme at all:

- no parameter prefetch. It reads ahead in a trace that names a parameter twice, once for forward
  and once for backward, and dies on an assertion when both are in its window;
- the default sub-group (the whole model). Smaller ones die on an assertion in the optimizer's swap;
- as many swap buffers as parameters are held at once. By default it keeps every parameter it has
  met until the end of the step (`kept`: faster, more memory); without that, ten buffers do.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.bench.adam_peers import prepare_deepspeed
from offload.bench.step_systems import Batch, Moved, StepTimes, adamw_arguments, build_model
from offload.tiers.units import round_up
from offload.train.model import LanguageModel

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_ALIGNMENT = 1 << 20  # elements; its swap buffers must hold the largest parameter
_QUIET = 10**9  # steps between its progress lines
_BUFFERS_OF_ONE_BLOCK = 10


class LossOnly(nn.Module):
    """Its hooks find the tensors in tensors, tuples and dicts, not in a dataclass."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor | None = self.model(inputs, targets).loss
        assert loss is not None, "targets were given"
        return loss


class DeepSpeedZero3:
    """The model of `Plain`, its states on `device`: cpu or nvme (then in `folder`)."""

    defers = False

    def __init__(
        self, config: OffloadConfig, device: str, folder: Path, *, kept: bool = False
    ) -> None:
        _single_process()
        deepspeed: Any = importlib.import_module("deepspeed")
        self._model = LossOnly(build_model(config))
        params = list(self._model.parameters())
        settings = _settings(config, device)
        if device == "nvme":
            _put_on_nvme(settings["zero_optimization"], folder, params, kept=kept)
        # Without this call its engine takes bf16 for the swapped parameters of an fp32 model on a
        # CPU without fp16 arithmetic, and the first product fails.
        deepspeed.zero.Init(module=self._model, config_dict_or_path=settings)
        self._engine: Any = deepspeed.initialize(
            model=self._model, model_parameters=self._model.parameters(), config=settings
        )[0]

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        """Its engine divides by the number of micro-batches and steps at the last one."""
        losses = []
        computing_s = 0.0
        started = time.perf_counter()
        for inputs, targets in micro_batches:
            began = time.perf_counter()
            loss = self._engine(inputs, targets)
            self._engine.backward(loss)
            losses.append(loss.item())
            computing_s += time.perf_counter() - began
            self._engine.step()
        seconds = time.perf_counter() - started
        return StepTimes(sum(losses) / len(losses), seconds, computing_s)

    def settle(self) -> None:
        """Its step returns when it is over."""

    def moved(self) -> Moved:
        return Moved.by_the_kernel()

    def close(self) -> None:
        import torch.distributed as dist

        self._engine.destroy()
        dist.destroy_process_group()


def _single_process() -> None:
    """What a launcher would set for a world of one, where none has set anything."""
    prepare_deepspeed()
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def _settings(config: OffloadConfig, device: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.batch,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "steps_per_print": _QUIET,
        "optimizer": {
            "type": "AdamW", "params": adamw_arguments(config),
        },
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
        },
    }  # fmt: skip
    if config.clip_grad_norm is not None:
        settings["gradient_clipping"] = config.clip_grad_norm
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    return settings


def _put_on_nvme(
    zero: dict[str, Any], folder: Path, params: Sequence[torch.nn.Parameter], *, kept: bool
) -> None:
    """Folders and buffers; see the module's docstring for why these."""
    largest = max(param.numel() for param in params)
    zero["stage3_prefetch_bucket_size"] = 0
    if not kept:
        zero["stage3_max_reuse_distance"] = 0
    zero["offload_param"] |= {
        "nvme_path": str(folder), "max_in_cpu": 0,
        "buffer_size": round_up(largest, _ALIGNMENT),
        "buffer_count": len(params) if kept else _BUFFERS_OF_ONE_BLOCK,
    }  # fmt: skip
    zero["offload_optimizer"] |= {
        "nvme_path": str(folder), "pipeline_read": True, "pipeline_write": True, "buffer_count": 5,
    }  # fmt: skip
