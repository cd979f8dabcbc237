"""The scheduler that replaces DeepSpeed's OneCycle; `offload migrate` prints its source."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class LambdaLRAndBetas(LambdaLR):
    """Sets learning rates by `functions` and first betas by `betas`, one per param group."""

    def __init__(self, optimizer: Any, functions: list[Any], betas: list[Any]) -> None:
        self.betas = betas
        super().__init__(optimizer, functions)

    def get_lr(self) -> list[Any]:
        for group, beta in zip(self.optimizer.param_groups, self.betas, strict=True):
            group["betas"] = (beta(self.last_epoch), 0.99)
        return super().get_lr()

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "betas"}
