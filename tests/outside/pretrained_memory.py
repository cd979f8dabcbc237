"""Opens a folder of transformers, trains one step and prints its memory in bytes as JSON.

python pretrained_memory.py FOLDER SWAP SMALL_FOLDER HOST_MIB
"""

import gc
import json
import sys
from typing import Any

import torch

import offload
from offload.process import machine


def keys(swap: str, host_mib: int) -> dict[str, Any]:
    return {
        "budget": {"host": f"{host_mib}MiB", "nvme": "8GiB"},
        "nvme": {"paths": [swap]},
        "placement": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"},
        "optimizer": {"chunk": 262144},
    }


def train(folder: str, swap: str, host_mib: int) -> dict[str, int]:
    """Only the last block trains, as an adapter would: the rest is read, and never written."""
    model: Any = offload.open_pretrained(folder)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    tokens = torch.arange(8).reshape(1, 8)
    with offload.initialize(model, keys(swap, host_mib)) as engine:
        loaded = machine.peak_rss_nbytes()
        model(input_ids=tokens, labels=tokens).loss.backward()
        engine.optimizer.step()
        engine.settle()
    return {"model": nbytes, "largest": largest, "loaded": loaded}


def main() -> None:
    folder, swap, small, host_mib = *sys.argv[1:4], int(sys.argv[4])
    train(small, swap, host_mib)  # what the frameworks take
    gc.collect()
    machine.trim_memory()
    baseline = machine.peak_rss_nbytes()
    sizes = train(folder, swap, host_mib)
    print(json.dumps({**sizes, "baseline": baseline, "peak": machine.peak_rss_nbytes()}))


if __name__ == "__main__":
    main()
