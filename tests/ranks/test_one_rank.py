"""A process group of one rank: what of NCCL a single GPU can show, and the same on gloo."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload.swap.device.streams import StreamEvent, mark_here
from offload.swap.threads.ordered import OrderedWork
from offload.zero.groups.layout import SHARD_ALIGN_NUMEL
from offload.zero.ranks.collectives import Workspace, all_gather_flat
from offload.zero.ranks.ranks import Ranks
from tests.ranks.processes import run_ranks

NUMEL = 64 * SHARD_ALIGN_NUMEL
ROUNDS = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def backend_alone(device_type: str, folder: str) -> dict[str, list[Tensor]]:
    """What an all-gather and an all-to-all of this rank with itself bring, in two queues that run
    side by side as those of an engine do; and what `Collectives` makes of one rank."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", 0)
        dist.destroy_process_group()
        store = dist.FileStore(str(Path(folder) / "nccl"), 1)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    ranks = Ranks.meet(3, None, device, timeout_s=20)
    assert ranks.exchange([3, 4]).tolist() == [[3, 4]]
    assert ranks.exchange([1 << 40]) == 1 << 40
    collectives = ranks.collectives()
    queues = OrderedWork("gathers", device), OrderedWork("reduces", device)
    given = [torch.arange(NUMEL, device=device, dtype=torch.float32) + n for n in range(ROUNDS)]
    ready = mark_here(device)

    def gather(index: int) -> tuple[Tensor, StreamEvent]:
        ready.before_compute()
        whole, group = torch.empty_like(given[index]), collectives.gather_group
        with ranks.watch.during(f"gathering {index}", group, on_device=True):
            all_gather_flat(whole, given[index], group)
        return whole, mark_here(device)

    def exchange(index: int) -> tuple[Tensor, StreamEvent]:
        ready.before_compute()
        received, group = torch.empty_like(given[index]), collectives.reduce_group
        with ranks.watch.during(f"reducing {index}", group, on_device=True):
            dist.all_to_all_single(received, given[index], group=group)
        return received, mark_here(device)

    def reduce(index: int) -> tuple[Tensor, StreamEvent]:
        ready.before_compute()
        byte = {"dtype": torch.uint8, "device": device}
        work = Workspace(torch.empty(4 * NUMEL, **byte), torch.empty(4 * NUMEL, **byte))
        return collectives.reduce(given[index], work, f"group {index}"), mark_here(device)

    results: dict[str, list[Tensor]] = {"given": [each.cpu() for each in given]}
    try:
        for queue, run in zip((*queues, queues[1]), (gather, exchange, reduce), strict=True):
            transfers = [
                queue.submit(run.__name__, lambda n=n, run=run: run(n)) for n in range(ROUNDS)
            ]
            results[run.__name__] = []
            for transfer in transfers:
                tensor, mark = transfer.wait()
                mark.before_compute()
                results[run.__name__].append(tensor.cpu())
        deadline = time.monotonic() + 10
        while ranks.watch._doing and time.monotonic() < deadline:
            time.sleep(0.1)  # what was queued on a GPU is seen to have ended a little later
        assert not ranks.watch._doing
    finally:
        for queue in queues:
            queue.close()
        ranks.watch.close()
    return results


@pytest.mark.parametrize("device_type", DEVICES)
def test_a_backend_serves_one_rank_in_two_queues(device_type: str, tmp_path: Path) -> None:
    (results,) = run_ranks(1, tmp_path, backend_alone, device_type, str(tmp_path))
    given = results.pop("given")
    assert results.keys() == {"gather", "exchange", "reduce"}
    for name, tensors in results.items():
        assert len(tensors) == ROUNDS
        for tensor, expected in zip(tensors, given, strict=True):
            assert torch.equal(tensor, expected), name
