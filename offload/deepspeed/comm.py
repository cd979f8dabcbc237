"""`deepspeed.comm`: torch.distributed, with a process group even for a single process."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed

from offload.tiers import accelerator


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True,
    distributed_port: int = 29500, verbose: bool = True, timeout: timedelta | None = None,
    init_method: str | None = None, dist_init_required: bool | None = None, config: Any = None,
    rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Initialise torch's process group as `torchrun` asks for it, or one of this process alone. Do
    nothing if there is a process group, or with `dist_init_required=False`."""
    if dist_init_required is False or torch.distributed.is_initialized():
        return
    kind = accelerator.default_type()
    backend = dist_backend or (
        "gloo" if kind == "cpu"
        else f"cpu:gloo,{kind}:{torch.distributed.get_default_backend_for_device(kind)}"
    )  # fmt: skip
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if "WORLD_SIZE" in os.environ or init_method is not None or world_size > 0:
        torch.distributed.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, **more
        )
        return
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, **more)


def get_local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(torch.distributed, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch.distributed, name)
