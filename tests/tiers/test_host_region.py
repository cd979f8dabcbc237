"""A forked child shares no pages of host memory but those that a tensor still views."""

import mmap
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import Tier
from tests.offload.test_threads_and_forks import child_says

MIB, PAGE = 1 << 20, mmap.PAGESIZE


@contextmanager
def child() -> Iterator[int]:
    """A child that lives inside."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        yield pid
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads
        return os.fork()


def proportional_nbytes(*processes: int) -> int:
    """RAM of processes; what they share counts once."""
    total = 0
    for process in processes:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        total += next(int(row.split()[1]) for row in text.splitlines() if row.startswith("Pss:"))
    return total << 10


def tier(nbytes: int) -> MemoryTier:
    return MemoryTier(Tier.HOST, nbytes, HostMemory(nbytes), Ledger())


def lease_of(host: MemoryTier, nbytes: int, value: int = 0) -> Lease:
    lease = host.lease(nbytes, owner="a", state_class=StateClass.OPTIMIZER)
    lease.tensor.fill_(value)
    return lease


def test_what_the_parent_rewrites_while_a_child_lives_takes_no_more_ram():
    lease = lease_of(tier(128 * MIB), 128 * MIB, 1)
    with child() as other:
        before = proportional_nbytes(os.getpid(), other)
        lease.tensor.fill_(2)
        grown = proportional_nbytes(os.getpid(), other) - before
    assert grown < 8 * MIB
    assert int(lease.tensor.min()) == 2


def test_a_child_has_what_somebody_views_as_it_was_and_nothing_else():
    host = tier(MIB)
    seen, unseen, freed = (lease_of(host, 5 * PAGE, value) for value in (1, 2, 3))
    views = [seen.tensor[8:12], freed.tensor.view(torch.float32).data[1:], seen.tensor.numpy()]
    expected = [view.tolist() for view in views]
    freed.free()
    assert child_says(lambda: [view.tolist() for view in views]) == repr(expected)
    for use in (lambda t: t.max(), lambda t: t[:4], lambda t: t.view(torch.float32), Tensor.numpy):
        assert "StateError: this memory belongs to the process that" in child_says(
            lambda use=use: use(unseen.tensor)
        )
    assert "StateError" in child_says(unseen.in_use)
    assert int(unseen.tensor.min()) == 2
    with child() as other:
        seen.tensor.fill_(7)
        assert views[0].tolist() == [7] * 4
        assert os.waitpid(other, os.WNOHANG) == (0, 0)


def test_a_child_keeps_its_values_whatever_the_parent_does_meanwhile():
    lease = lease_of(tier(MIB), PAGE, 1)
    view, (read, write) = lease.tensor[:3], os.pipe()

    def wait_and_look() -> list[int]:
        os.read(read, 1)
        return view.tolist()

    thread = threading.Timer(0.1, lambda: (lease.tensor.fill_(9), os.write(write, b"x")))
    thread.start()
    said = child_says(wait_and_look)
    thread.join()
    assert said == "[1, 1, 1]"


def test_closing_gives_back_memory_without_other_views_although_its_tensors_live():
    before = proportional_nbytes(os.getpid())
    host = tier(64 * MIB)
    unseen, seen = lease_of(host, 32 * MIB, 1), lease_of(host, PAGE, 2)
    rest = lease_of(host, 31 * MIB, 3)
    view = seen.tensor[:2]
    assert proportional_nbytes(os.getpid()) - before > 60 * MIB
    host.close()
    assert proportional_nbytes(os.getpid()) - before < 8 * MIB
    assert view.tolist() == [2, 2]
    assert not unseen.freed
    assert not rest.freed


def test_children_forked_by_several_threads_at_once_have_what_is_seen():
    lease = lease_of(tier(MIB), 16 * PAGE, 3)
    view, seen = lease.tensor[:2], []

    def work() -> None:
        seen.extend(child_says(view.tolist) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["[3, 3]"] * 20


@pytest.mark.gpu
def test_a_child_of_a_process_with_pinned_memory_copies_none_of_it():
    memory = HostMemory(512 * MIB, pin_for=torch.device("cuda", 0))
    memory.tensor(0, 512 * MIB).fill_(1)
    assert memory.pinned
    before = proportional_nbytes(os.getpid())
    with child() as other:
        assert proportional_nbytes(os.getpid(), other) - before < 64 * MIB
    memory.close()
