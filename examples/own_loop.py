"""A training loop of one's own: what offload changes in it are the lines marked with <--.

python examples/own_loop.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import offload  # <--

CONFIG = {  # <-- or a YAML file
    "budget": {"host": "64MiB", "nvme": "1GiB"},
    "placement": {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"},
    "optimizer": {"type": "adamw", "lr": 1e-3},
    "clip_grad_norm": 1.0,
}
LENGTH, WIDTH = 64, 256
TEXT = torch.tensor(list(Path(__file__).with_name("soliloquy.txt").read_bytes()))


class Model(nn.Module):
    """The next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def rows() -> Tensor:
    """Pieces of the text, drawn at random."""
    return torch.stack([TEXT[n : n + LENGTH + 1] for n in torch.randint(len(TEXT) - LENGTH, (8,))])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def main(steps: int) -> None:
    torch.manual_seed(0)
    model = Model()
    with offload.initialize(model, CONFIG) as engine:  # <-- instead of model.to(...), AdamW(...)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, steps)
        for step in range(steps):
            loss = loss_of(model, rows())
            loss.backward()
            engine.optimizer.step()  # <-- the engine's
            engine.optimizer.zero_grad()
            schedule.step()
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        print(
            {name: f"{tier.peak_nbytes >> 20} MiB" for name, tier in engine.report().tiers.items()}
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
