"""`python -m offload.train.baseline_probe PRECISION`: train a tiny model, print its peak RAM.

Everything that a run loads or compiles is loaded here: the model's kernels, the optimizer's, files.
The few hundred KiB of the model's own states count as part of it.
"""

import sys
import tempfile

import torch

import offload
from offload.gpt import build_meta_model
from offload.process.machine import peak_rss_nbytes


def peak_nbytes(precision: str, *, checkpoint: bool = False) -> int:
    """Peak RAM of this process after three steps, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        config = offload.OffloadConfig.load({
            "device": "cpu",
            "precision": precision,
            "budget": {"host": "64MiB", "nvme": "64MiB"},
            "nvme": {"paths": [folder]},
            "placement": {
                "parameters": "nvme", "gradients": "host", "optimizer": "nvme",
                "activations": {"checkpoint": checkpoint},
            },
            "optimizer": {"chunk": 1 << 14},
            "train": {"model": {"layers": 2, "hidden": 64, "heads": 2}, "batch": 2, "sequence": 64},
        })  # fmt: skip
        model = build_meta_model(config)
        with offload.initialize(model, config) as engine:
            for _ in range(3):
                tokens = torch.zeros(2, 64, dtype=torch.int64)
                engine.backward(model(tokens, tokens).loss)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    return peak_rss_nbytes()


def main(precision: str) -> None:
    """Print the peak of a plain run, and what checkpoints add."""
    plain = peak_nbytes(precision)
    print(plain, peak_nbytes(precision, checkpoint=True) - plain)


if __name__ == "__main__":
    main(sys.argv[1])
