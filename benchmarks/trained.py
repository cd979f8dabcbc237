"""DeepSpeed ZeRO-3 with offload, driven through its public interface, as a peer of whole steps.

On a CPU with its defaults but for what has to be otherwise for this model to train from nvme:

- no parameter prefetch. It reads ahead in a trace that names a parameter twice, once for forward
  and once for backward, and dies on an assertion when both are in its window;
- the default sub-group (the whole model). Smaller ones die on an assertion in the optimizer's swap;
- it does not keep the parameters that it has met until the end of the step, so ten swap buffers do.

On a GPU with its documented offload settings: pinned memory, overlapped communication, its CPU
Adam, which it compiles first, and the model built inside `zero.Init`, so that it is never whole in
device memory. Activation checkpointing is the model's own, as for `offload.bench.systems.Offload`.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from offload.bench.systems import Plain, System
from offload.gpt import LanguageModel
from offload.tiers.units import round_up
from offload.train.plain import LossOnly, StepTimes, adamw_arguments, build_model
from offload.train.text import Batch

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_ALIGNMENT = 1 << 20  # elements; its swap buffers must hold the largest parameter
_QUIET = 10**9  # steps between its progress lines
_BUFFERS_OF_ONE_BLOCK = 10


class DeepSpeedZero3(System):
    """The model of `systems.Plain`, its states on `device`: cpu or nvme (then in `folder`)."""

    def __init__(self, config: OffloadConfig, folder: Path, *, device: str) -> None:
        gpu = config.device == "cuda"
        prepare("cuda" if gpu else "cpu")
        deepspeed: Any = importlib.import_module("deepspeed")
        settings = settings_of(config, device)
        if gpu:
            torch.manual_seed(config.seed)
            with deepspeed.zero.Init(config_dict_or_path=settings):
                model = LossOnly(_whole_model(config))
        else:
            model = LossOnly(build_model(config))
            if device == "nvme":
                _put_on_nvme(settings["zero_optimization"], folder, model)
            # Without this call its engine takes bf16 for the swapped parameters of an fp32 model on
            # a CPU without fp16 arithmetic, and the first product fails.
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        self._engine: Any = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )[0]

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        """Take a step: its engine divides by the micro-batches, and steps at the last one."""
        losses = []
        computing_s = 0.0
        started = time.perf_counter()
        for inputs, targets in micro_batches:
            began = time.perf_counter()
            loss = self._engine(inputs, targets)
            self._engine.backward(loss)
            losses.append(loss.item())
            known_at = time.perf_counter()
            computing_s += known_at - began
            self._engine.step()
        seconds = time.perf_counter() - started
        return StepTimes(sum(losses) / len(losses), seconds, computing_s, known_at)

    def close(self) -> None:
        self._engine.destroy()
        dist.destroy_process_group()


def _whole_model(config: OffloadConfig) -> LanguageModel:
    """A model with initial values of its own."""
    checkpoint = config.placement.activations.checkpoint is not False
    return LanguageModel(config.train.model, checkpoint_activations=checkpoint)


def prepare(accelerator: str) -> None:
    """Set what DeepSpeed reads from the environment when it is imported: the device, ninja's
    folder, and a launcher's variables for a world of one, unless they are set."""
    if accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((folder, os.environ["PATH"]))
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def settings_of(config: OffloadConfig, device: str) -> dict[str, Any]:
    """DeepSpeed's configuration: all states on `device`, the rest as in `config`."""
    offloaded: dict[str, Any] = {"device": device}
    zero: dict[str, Any] = {"stage": 3}
    if config.device == "cuda":
        offloaded["pin_memory"] = True
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    zero |= {"offload_param": dict(offloaded), "offload_optimizer": dict(offloaded)}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.batch,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "steps_per_print": _QUIET,
        "optimizer": {"type": "AdamW", "params": adamw_arguments(config)},
        "zero_optimization": zero,
    }
    if config.clip_grad_norm is not None:
        settings["gradient_clipping"] = config.clip_grad_norm
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    return settings


def _put_on_nvme(zero: dict[str, Any], folder: Path, model: nn.Module) -> None:
    """Set folders and buffers; see the module's docstring for the reasons."""
    largest = max(param.numel() for param in model.parameters())
    zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    zero["offload_param"] |= {
        "nvme_path": str(folder), "max_in_cpu": 0,
        "buffer_size": round_up(largest, _ALIGNMENT),
        "buffer_count": _BUFFERS_OF_ONE_BLOCK,
    }  # fmt: skip
    zero["offload_optimizer"] |= {
        "nvme_path": str(folder), "pipeline_read": True, "pipeline_write": True, "buffer_count": 5,
    }  # fmt: skip


# ---------------------------------------------------------------- plain PyTorch on several ranks
class Replicated(Plain):
    """DistributedDataParallel: every rank has everything."""

    keeps_masters = False

    def wrapped(self, model: LossOnly) -> nn.Module:
        dist.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model)


class FullySharded(Replicated):
    """`fully_shard` applied to every block and to the root, as in its documentation."""

    def __init__(self, config: OffloadConfig, folder: Path, *, offload: bool = False) -> None:
        self._offload = offload
        super().__init__(config, folder)

    def wrapped(self, model: LossOnly) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        dist.init_process_group("gloo")
        settings: dict[str, Any] = {}
        if self._offload:  # there is no GPU that memory could be pinned for
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.model.layers:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        return model
