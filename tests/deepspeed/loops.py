"""A DeepSpeed-style loop over `offload.deepspeed`, and the same in plain PyTorch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import offload.deepspeed as deepspeed
from offload.deepspeed.engine import EngineModule
from offload.deepspeed.schedules import Schedule

IN, OUT, BATCH = 8, 4, 2
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.05, "optimizer": ADAMW,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


def model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, 16), nn.Tanh(), nn.Linear(16, OUT))


def batch(number: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    x, y = torch.randn(BATCH, IN, generator=made), torch.randn(BATCH, OUT, generator=made)
    return x.to(dtype), y.to(dtype)


@contextmanager
def initialized(
    of: nn.Module, config: dict[str, Any] | None = None, **more: Any
) -> Iterator[EngineModule]:
    if "optimizer" not in more:
        more.setdefault("model_parameters", of.parameters())
    engine, *_ = deepspeed.initialize(model=of, config=config or BASE, **more)
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, passes: range) -> list[float]:
    losses = []
    for number in passes:
        x, y = batch(number)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Plain:
    """What `BASE` says, in plain PyTorch."""

    def __init__(self, of: nn.Module, steps: int = 3, clip: float = 0.05, **schedule: Any) -> None:
        self.model = copy.deepcopy(of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scheduler = Schedule.of(**schedule).on(self.optimizer) if schedule else None
        self.norms: list[float] = []
        self._steps, self._clip, self._passes = steps, clip, 0

    def train(self, passes: range) -> list[float]:
        losses = []
        for number in passes:
            x, y = batch(number)
            loss = nn.functional.mse_loss(self.model(x), y)
            (loss / self._steps).backward()
            self._passes += 1
            if self._passes % self._steps == 0:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
                self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
            losses.append(loss.item())
        return losses


def weights(of: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in of.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, second, strict=True))
