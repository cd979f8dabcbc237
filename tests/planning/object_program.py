"""`python object_program.py FOLDER`: what objects a model of many small layers takes, in bytes.

Prints as JSON the growth of the process beside the tiers and beside holes in the heap, from a model
of a few layers to one of many, for each parameter, and what is predicted for one.
"""

from __future__ import annotations

import gc
import json
import sys

import torch
from torch import nn

import offload
from offload.planning.machine.baseline import OBJECTS_NBYTES

FEW, MANY = 10, 100  # layers, of two parameters each


def taken_nbytes(layers: int, folder: str) -> int:
    """Of the process, after some steps of a model that is on nvme."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    config = {
        "device": "cpu",
        "budget": {"host": "16MiB", "nvme": "1GiB"},
        "nvme": {"paths": [folder]},
        "placement": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"},
        "optimizer": {"type": "adamw", "lr": 1e-3, "chunk": 1 << 10},
    }
    with offload.initialize(model, config) as engine:
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        gc.collect()
        seen = engine.report().process
        return seen.rss_nbytes - seen.tiers_nbytes - seen.holes_nbytes


if __name__ == "__main__":
    taken_nbytes(FEW, sys.argv[1])  # imports and compiled kernels
    few = taken_nbytes(FEW, sys.argv[1])
    many = taken_nbytes(MANY, sys.argv[1])
    print(json.dumps([(many - few) // (2 * (MANY - FEW)), OBJECTS_NBYTES]))
