"""One DeepSpeed program: run with DeepSpeed, or with its import changed. Prints JSON.

python one_loop.py deepspeed|offload.deepspeed STAGE
"""

import importlib
import json
import os
import socket
import sys
from typing import Any

import torch
from torch import nn

STEPS = 12


def main(name: str, stage: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    deepspeed: Any = importlib.import_module(name)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.05, "zero_optimization": {"stage": stage},
        "optimizer": {
            "type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}
        },
        "scheduler": {
            "type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 5}
        },
    }  # fmt: skip
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    rows = []
    for number in range(STEPS):
        made = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 8, generator=made), torch.randn(2, 4, generator=made)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        rows.append([loss.item(), float(engine.get_global_grad_norm() or 0), engine.get_lr()[0]])
    print("rows", json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
