"""Refuses a device's graphs (CUDA graphs) around a model whose parameters are offloaded: a graph
replays kernels with the addresses they had, and fetching changes addresses and waits in threads."""

from __future__ import annotations

import torch

from offload.tiers import accelerator
from offload.tiers.errors import UnsupportedError


def refuse_capture(device: torch.device) -> None:
    """Raise UnsupportedError if this thread's stream of `device` is recording a graph."""
    if accelerator.is_capturing(device):
        raise UnsupportedError(
            f"a {accelerator.of(device).title} graph is being captured (torch.cuda.graph, "
            "torch.cuda.make_graphed_callables) while an offloaded model is called: its parameters "
            "have another address at each use, and are waited for by threads, which a graph cannot "
            "replay; leave this model's forward, backward and step out of the graph, and capture "
            "parts without parameters alone; torch.compile(model) saves launches, too"
        )
