"""The loop of own_loop.py on several ranks, which share the states. Lines that several ranks change
are marked with <--.

torchrun --nproc-per-node 2 examples/ranks.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from own_loop import CONFIG, Model, loss_of, rows

import offload


def main(steps: int) -> None:
    if not dist.is_torchelastic_launched():
        sys.exit("start it by torchrun: torchrun --nproc-per-node 2 examples/ranks.py")
    torch.manual_seed(0)
    model = Model()  # the first rank's values are used on all
    config = {**CONFIG, "zero": {"stage": 3}}  # <-- each rank keeps its part of everything
    with offload.initialize(model, config) as engine:  # joins the ranks that torchrun has begun
        rank = dist.get_rank()
        torch.manual_seed(rank)  # <-- other rows than the other ranks'
        for step in range(steps):
            loss = loss_of(model, rows())
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            dist.all_reduce(loss.detach_().div_(dist.get_world_size()))  # <-- to print the average
            if rank == 0 and (step % 10 == 0 or step == steps - 1):
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        engine.save_checkpoint("runs/ranks/checkpoint")  # all ranks together; any number loads it
        peaks = {name: tier.peak_nbytes >> 20 for name, tier in engine.report().tiers.items()}
        print(f"rank {rank}, MiB: {peaks}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
