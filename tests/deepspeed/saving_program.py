"""A DeepSpeed program that saves a checkpoint and trains on.

python saving_program.py STAGE fp32|bf16 FOLDER
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """A frozen parameter, a buffer, and sizes that are not even."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.frozen, self.b = nn.Linear(8, 17), nn.Linear(17, 5), nn.Linear(5, 4)
        self.register_buffer("offset", torch.arange(4.0))
        self.frozen.weight.requires_grad_(False)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.b(self.frozen(torch.tanh(self.a(x.to(self.dtype)))))
        return out.float() + self.offset


def made(deepspeed: Any, stage: int, precision: str, seed: int) -> Any:
    config: dict[str, Any] = {
        "train_batch_size": 2, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
        "zero_optimization": {"stage": stage, "sub_group_size": 100},
    }  # fmt: skip
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    torch.manual_seed(seed)
    net = Net(torch.bfloat16 if precision == "bf16" else torch.float32)
    params = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]


def go_on(engine: Any, passes: range) -> list[float]:
    losses = []
    for number in passes:
        drawn = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 8, generator=drawn), torch.randn(2, 4, generator=drawn)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(stage: int, precision: str, folder: str) -> None:
    import deepspeed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    engine = made(deepspeed, stage, precision, seed=1)
    go_on(engine, range(5))
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    (Path(folder) / "after.json").write_text(json.dumps(go_on(engine, range(5, 10))))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
