"""What is written to parameters, however torch lets one do that, is what training goes on with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import StateError, UnsupportedError
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    ON,
    TinyLM,
    batches,
    config,
    on_the_cpu_alone,
    seeded,
)
from tests.offload.engine_states import assert_same_bits, losses_of, parameters_of, states_of

pytestmark = MARKS

Write = Callable[[nn.Module], Any]


def each(write: Callable[[nn.Parameter], Any]) -> Write:
    def write_all(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                write(param)

    return write_all


def set_data(param: nn.Parameter) -> None:
    param.data = param.data * 0.5


def from_vector(model: nn.Module) -> None:
    params = list(model.parameters())
    vector = nn.utils.parameters_to_vector(params).detach()
    nn.utils.vector_to_parameters(vector * 0.5, params)


WRITES: dict[str, Write] = {
    "mul_": each(lambda p: p.mul_(0.9)),
    "data.clamp_": each(lambda p: p.data.clamp_(-0.05, 0.05)),
    "init": each(nn.init.ones_),
    "copy_": each(lambda p: p.copy_(torch.full_like(p, 0.1))),
    "an element": each(lambda p: p.view(-1)[3:5].fill_(0.3)),
    "data": each(set_data),
    "vector_to_parameters": from_vector,
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.sample("host-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_what_is_written_between_steps_is_what_the_next_step_begins_with(
    placement: Any, precision: str, tmp_path: Path, long: bool
) -> None:
    """As inside `gathered`: a master becomes the value that was written."""
    if not long and precision == "fp16":
        pytest.skip("masters are kept as those of bf16: in make test-long")
    for name, write in WRITES.items():
        states = []
        for gathered in (True, False):
            keys = config(tmp_path, placement, precision=precision)
            with offload.initialize(seeded(TinyLM), keys) as engine:
                losses_of(engine, batches(2))
                if gathered:
                    with engine.gathered():
                        write(engine.module)
                else:
                    write(engine.module)
                values = parameters_of(engine)
                losses_of(engine, batches(1))
                states.append({**{f"then {k}": v for k, v in values.items()}, **states_of(engine)})
        try:
            assert_same_bits(*states)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


class Constrained(nn.Linear):
    """Changes its weight in its own forward, in a way that autograd does not count."""

    spelling = "data.mul_"

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "data.mul_":
            self.weight.data.mul_(0.9)
        elif self.spelling == "data":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        else:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


def constrained() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(Constrained(16, 16), nn.Tanh()) for _ in range(4)])


@pytest.mark.parametrize("spelling", ["data.mul_", "data", "mul_"])
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_a_forward_that_writes_to_its_weights_trains_as_plain_torch(
    placement: Any, spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Constrained, "spelling", spelling)
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    plain = seeded(constrained).to(ON)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999))
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3)).to(ON)
    for _ in range(4):
        plain(x).square().mean().backward()
        adam.step()
        adam.zero_grad()
    keys = config(tmp_path, placement, optimizer={**optimizer, "betas": [0.9, 0.999]})
    with offload.initialize(seeded(constrained), keys) as engine:
        for _ in range(4):
            engine.module(x).square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        for name, value in parameters_of(engine).items():
            torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(),
                                       rtol=1e-6, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_values_of_another_format_are_refused_by_name(placement: Any, tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, placement)) as engine:
        before = states_of(engine)
        weight = engine.module.norm.weight

        def bind() -> None:
            weight.data = weight.data.double()
            engine.module.loss(batches(1)[0])  # where it was bound at once: noticed here

        with pytest.raises(UnsupportedError, match=r"norm\.weight\.data was set to"):
            bind()
        if placement is NVME:
            assert_same_bits(states_of(engine), before)


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_a_step_inside_gathered_is_refused(placement: Any, tmp_path: Path) -> None:
    keys = config(tmp_path, placement, precision="bf16")
    with offload.initialize(seeded(TinyLM), keys) as engine:
        engine.module.loss(batches(1)[0]).backward()
        with engine.gathered(), pytest.raises(StateError, match="is gathered"):
            engine.optimizer.step()
        engine.optimizer.step()
        stepped = states_of(engine)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        engine.module.loss(batches(1)[0]).backward()
        engine.optimizer.step()
        assert_same_bits(states_of(engine), stepped)


ABANDONED = """
import sys, offload, torch
engine = offload.initialize(torch.nn.Linear(64, 64), {
    "device": "cpu", "placement": {"parameters": "nvme"}, "budget": {"host": "16MiB"},
    "nvme": {"paths": [sys.argv[1]]},
})

def params():
    with engine.gathered():
        yield from engine.module.parameters()

generator = params()
weight = next(generator)
context = engine.gathered()
context.__enter__()
"""


@on_the_cpu_alone("its process computes on the CPU")
@pytest.mark.slow
def test_a_gathered_block_that_is_never_left_does_not_end_the_process_badly(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ABANDONED, str(tmp_path)], capture_output=True, timeout=120
    )
    assert (ended.returncode, ended.stderr.decode()) == (0, "")
