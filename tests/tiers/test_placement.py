"""Placement, units and eviction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.tiers.units import in_one_unit, parse_bytes

HOST, NVME, DEVICE = Tier.HOST, Tier.NVME, Tier.DEVICE


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), percent=st.integers(0, 100))
@settings(deadline=None, derandomize=True)
def test_every_tier_is_within_one_piece_of_its_share(sizes, percent):
    share = percent / 100
    placement = Placement(((HOST, share), (NVME, 1 - share)))
    tiers = placement.assign(sizes)
    held = sum(size for size, tier in zip(sizes, tiers, strict=True) if tier is HOST)
    assert abs(held - share * sum(sizes)) <= max(sizes)


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    percents=st.tuples(st.integers(1, 98), st.integers(0, 1)),
)
@settings(deadline=None, derandomize=True)
def test_the_first_pieces_are_the_devices_and_the_others_keep_their_shares(sizes, percents):
    first, rest = percents[0] / 100, (1 - percents[0] / 100) / 2
    shares = ((DEVICE, first), (HOST, 2 * rest))
    if percents[1]:
        shares = ((DEVICE, first), (HOST, rest), (NVME, rest))
    tiers = Placement(shares).assign(sizes, device_first=True)
    count = tiers.count(DEVICE)
    assert tiers[:count] == [DEVICE] * count
    room = first * sum(sizes) - sum(sizes[:count])
    assert -1e-3 <= room <= max(sizes)
    on_host = sum(size for size, tier in zip(sizes, tiers, strict=True) if tier is HOST)
    left = sum(sizes[count:])
    assert abs(on_host - (left / 2 if percents[1] else left)) <= max(sizes)


@pytest.mark.parametrize("shares", [(), ((HOST, 0.5),), ((HOST, 1.5), (NVME, -0.5))])
def test_shares_that_are_no_partition_are_refused(shares):
    with pytest.raises(ValueError, match="sum to 1"):
        Placement(shares)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 << 30), ("8GB", 8 * 10**9), ("1.5 MiB", 3 << 19), ("4096", 4096), (12, 12),
     ("2tib", 2 << 40), ("0", 0)],
)  # fmt: skip
def test_sizes_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "8 GiBs", "-1GiB", "1e3", "8,5GiB", True, "∞"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"size|unit"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "texts"),
    [
        ((1288490189, 800 << 20), ("1.2 GiB", "0.8 GiB")),
        ((96 << 20, 12 << 20, 4 << 30), ("96.0 MiB", "12.0 MiB", "4,096.0 MiB")),
        ((930 << 10, 2 << 20), ("930.0 KiB", "2,048.0 KiB")),
        (((4 << 30) + (12 << 20), 4 << 30), ("4.01 GiB", "4.00 GiB")),  # as many as differ
        (((4 << 30) + 4096, 4 << 30), ("4,096.004 MiB", "4,096.000 MiB")),
        ((900, 12), ("900 B", "12 B")),
        ((5 << 30, 5 << 30), ("5.0 GiB", "5.0 GiB")),
    ],
)
def test_amounts_that_are_compared_have_one_unit_and_differ(
    nbytes: tuple[int, ...], texts: tuple[str, ...]
) -> None:
    assert in_one_unit(*nbytes) == texts
