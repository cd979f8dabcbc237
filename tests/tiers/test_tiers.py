"""Tiers and ledger: a budget is a promise, and the books balance."""

import random

import pytest
import torch

from offload.process.machine import rss_nbytes
from offload.tiers.errors import IntegrityError, TierFullError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import PAGE_NBYTES, Tier

PARAMETERS = StateClass.PARAMETERS


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def host(ledger):
    return MemoryTier(Tier.HOST, 1 << 20, HostMemory(1 << 20), ledger)


def test_a_lease_beyond_the_budget_says_what_which_how_much_and_what_to_do(host):
    host.lease(800_000, owner="layer.2", state_class=PARAMETERS)
    with pytest.raises(TierFullError) as caught:
        host.lease(512 << 10, owner="layer.3", state_class=PARAMETERS)
    message = str(caught.value)
    assert "host tier full: layer.3 needs 512.0 KiB" in message
    assert "of 1.0 MiB free" in message
    assert message.endswith("raise budget.host or move parameters to nvme")


def test_a_ledger_that_does_not_balance_prints_the_balance(host, ledger):
    host.lease(PAGE_NBYTES, owner="a", state_class=PARAMETERS)
    ledger.accounts[Tier.HOST].by_class[PARAMETERS] += 1
    with pytest.raises(IntegrityError, match=r"parameters 4097 = 4097 by class, 4096 by account"):
        ledger.check_integrity()


def test_a_lease_is_in_use_while_a_view_of_it_lives(host):
    lease = host.lease(PAGE_NBYTES, owner="a", state_class=PARAMETERS)
    assert not lease.in_use()
    view = lease.tensor.view(torch.float32)[3:5]
    assert lease.in_use()
    del view
    assert not lease.in_use()


def test_a_reserved_budget_costs_no_memory_until_touched():
    memory = HostMemory(1 << 40)  # a terabyte of address space
    assert memory.tensor(1 << 39, 16).sum() == 0


def test_free_memory_is_given_back_and_what_is_leased_keeps_its_values():
    nbytes = 64 << 20
    tier = MemoryTier(Tier.HOST, nbytes, HostMemory(nbytes), Ledger())
    leases = [tier.lease(nbytes // 8, owner="a", state_class=PARAMETERS) for _ in range(8)]
    for number, lease in enumerate(leases):
        lease.tensor.fill_(number + 1)
    before, here = rss_nbytes(), [lease.extent.offset_bytes for lease in leases]
    for lease in leases[::2]:
        lease.free()
    assert tier.touched_nbytes == nbytes
    assert rss_nbytes() > before - (1 << 20)
    assert tier.arena.free_ranges() == [(start, start + nbytes // 8) for start in here[::2]]
    for start, stop in tier.arena.free_ranges():
        tier.give_back(start, stop)
    assert tier.touched_nbytes == nbytes // 2
    assert rss_nbytes() < before - nbytes // 4
    for start in here:  # none of these is free as a whole
        tier.give_back(start, start + nbytes // 4)
    assert all(bool((lease.tensor == 2 * n + 2).all()) for n, lease in enumerate(leases[1::2]))
    again = tier.lease(nbytes // 8, owner="b", state_class=PARAMETERS)
    assert int(again.tensor.fill_(9).min()) == 9
    assert tier.touched_nbytes == nbytes // 8 * 5


def test_the_budget_of_a_file_tier_holds_over_all_paths(ledger):
    tier = FileTier(4 * PAGE_NBYTES, [1.0, 1.0], ledger)
    for _ in range(4):
        tier.allocate(PAGE_NBYTES, "x", PARAMETERS)
    with pytest.raises(TierFullError, match=r"raise budget.nvme or add a path to nvme.paths"):
        tier.allocate(1, "layer.9", PARAMETERS)


def test_a_full_device_names_the_slower_tiers(ledger):
    memory = MemoryTier(Tier.DEVICE, PAGE_NBYTES, HostMemory(PAGE_NBYTES), ledger)
    with pytest.raises(TierFullError, match=r"budget.device or move parameters to host or nvme$"):
        memory.lease(2 * PAGE_NBYTES, owner="layer.3", state_class=PARAMETERS)


def test_a_lease_for_which_the_free_bytes_suffice_is_never_refused(long: bool):
    """Whatever sizes came and went before: no error, no byte beyond the budget, no lost value."""
    for seed in range(200 if long else 12):
        rng, pages = random.Random(seed), 64
        tier = MemoryTier(Tier.HOST, pages * PAGE_NBYTES, HostMemory(pages * PAGE_NBYTES), Ledger())
        held: dict[int, Lease] = {}
        for number in range(300):
            wanted = rng.choice([1, 1, 2, 3, 5, 8, 13, 21, 34]) * PAGE_NBYTES
            if wanted > tier.free_nbytes:
                with pytest.raises(TierFullError):
                    tier.lease(wanted, owner="more", state_class=PARAMETERS)
                for key in rng.sample(sorted(held), rng.randint(1, len(held))):
                    lease = held.pop(key)
                    assert bool((lease.tensor == key % 251).all())
                    lease.free()
            else:
                held[number] = tier.lease(wanted, owner=str(number), state_class=PARAMETERS)
                held[number].tensor.fill_(number % 251)
        assert all(bool((lease.tensor == key % 251).all()) for key, lease in held.items())
        for lease in held.values():
            lease.free()
        assert tier.used_nbytes == 0


def test_a_tier_in_pieces_takes_no_more_ram_than_its_budget():
    nbytes, part = 64 << 20, 4 << 20
    tier = MemoryTier(Tier.HOST, nbytes, HostMemory(nbytes), Ledger())
    parts = [tier.lease(part, owner="a", state_class=PARAMETERS) for _ in range(16)]
    for lease in parts:
        lease.tensor.fill_(1)
        assert int(lease.tensor.min()) == 1
    before = rss_nbytes()
    for lease in parts[::2]:
        lease.free()
    assert not tier.fits(2 * part)
    for number in range(4):  # behind the budget's addresses, and then in its holes again
        large = tier.lease(8 * part - number * part, owner="b", state_class=PARAMETERS)
        large.tensor.fill_(2)
        small = [tier.lease(part, owner="c", state_class=PARAMETERS) for _ in range(number)]
        for lease in small:
            lease.tensor.fill_(3)
        assert tier.touched_nbytes <= nbytes
        assert rss_nbytes() < before + part
        assert all(int(lease.tensor.min()) == 1 for lease in parts[1::2])
        for lease in (large, *small):
            lease.free()
    assert tier.fits(part)
