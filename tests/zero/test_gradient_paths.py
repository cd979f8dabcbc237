"""Gradients on their way from a device into accumulators in host memory."""

import random
import threading
import time

import pytest
import torch

from offload.kernels.floats import NORM_BLOCK, Body, norm_blocks, serial
from offload.swap.device.staging_ring import StagingRing
from offload.swap.device.streams import CopyStream
from offload.zero.gradients.gradient_paths import (
    DevicePartials,
    GradientPath,
    HostPath,
    LeavingPath,
)
from offload.zero.groups.layout import ParamShape, ParamSpec, lay_out
from tests.swap.stream_simulation import CUDA, World

LANDINGS = 3


def slow(body: Body, n: int) -> None:
    """A runner that takes its time: without a wait for an addition, the sum before it is seen."""
    time.sleep(2e-3)
    body(0, n)


def params(numels: list[int]) -> tuple[ParamSpec, ...]:
    return lay_out([ParamShape((str(i),), (numel,)) for i, numel in enumerate(numels)]).params


def leaving(
    specs: tuple[ParamSpec, ...], to_host: CopyStream, landing: int = LANDINGS
) -> LeavingPath:
    """A path whose ring has buffers of one block of the norm."""
    nbytes = NORM_BLOCK * 4
    buffers, landings = (
        [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)] for count in (2, landing)
    )
    blocks = sum(norm_blocks(spec.numel) for spec in specs)
    partials = DevicePartials(torch.zeros(blocks, dtype=torch.float64))
    return LeavingPath(specs, partials, StagingRing(buffers, to_host, CUDA, landings), slow)


@pytest.mark.parametrize("seed", range(3))
def test_sums_that_land_have_the_bits_of_sums_that_are_waited_for(monkeypatch, seed):
    World(monkeypatch, eager_model=True)
    draw, made = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [1, 255, 4000, NORM_BLOCK, 2 * NORM_BLOCK + 17]
    specs = params([draw.choice(sizes) for _ in range(4)])
    numel = specs[-1].stop
    to_host = CopyStream(CUDA)
    paths: list[GradientPath] = [HostPath(specs, serial), leaving(specs, to_host)]
    totals = [torch.zeros(numel) for _ in paths]
    for number in range(3):
        order = [index for index in range(4) if not number or draw.random() < 0.8]
        draw.shuffle(order)
        for index in order:
            dtype = draw.choice([torch.bfloat16, torch.float32])
            gradient = torch.randn(specs[index].numel, generator=made).to(dtype)
            for path, total in zip(paths, totals, strict=True):
                path.add(index, total, gradient.clone())
            if draw.random() < 0.2:
                assert paths[0].squares(index).tolist() == paths[1].squares(index).tolist()
    paths[1].when_there(lambda: None, "all").wait()
    for spec in specs:
        assert spec.of(totals[0]).equal(spec.of(totals[1]))
    for index in range(4):
        assert paths[0].squares(index).tolist() == paths[1].squares(index).tolist()
    to_host.close()


def test_backward_waits_for_no_addition_while_the_ring_has_room(monkeypatch):
    world = World(monkeypatch, eager_model=True)
    specs = params([NORM_BLOCK] * (LANDINGS + 1))
    to_host = CopyStream(CUDA)
    path, total = leaving(specs, to_host), torch.zeros(specs[-1].stop)
    gradient = torch.ones(NORM_BLOCK)
    world.watching.clear()  # nothing that was sent has arrived, as far as the ring's thread sees
    for index in range(LANDINGS):
        path.add(index, total, gradient)
    assert not total.any()
    last = threading.Thread(target=path.add, args=(LANDINGS, total, gradient))
    last.start()
    last.join(0.1)
    assert last.is_alive(), "all buffers are full"
    world.watching.set()
    last.join()
    path.when_there(lambda: None, "all").wait()
    assert total.eq(1).all()
    to_host.close()


def test_a_failed_addition_is_raised_where_its_gradients_are_waited_for(monkeypatch):
    World(monkeypatch, eager_model=True)
    specs = params([100, 200])
    to_host = CopyStream(CUDA)
    path, total = leaving(specs, to_host), torch.zeros(specs[-1].stop)
    path._host._run = lambda body, n: 1 // 0
    path.add(0, total, torch.ones(100))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            path.when_there(lambda: None, "all").wait()
    with pytest.raises(ZeroDivisionError):
        path.squares(0)
    to_host.close()


def test_passes_that_were_not_planned_are_added_at_once_and_told_of_once(monkeypatch, caplog):
    World(monkeypatch, eager_model=True)
    specs = params([100])
    to_host = CopyStream(CUDA)
    path, total = leaving(specs, to_host, landing=0), torch.zeros(specs[-1].stop)
    for _ in range(2):
        path.add(0, total, torch.ones(100))
    assert specs[0].of(total).eq(2).all()
    assert caplog.text.count("set gradient_accumulation_steps") == 1
    to_host.close()
