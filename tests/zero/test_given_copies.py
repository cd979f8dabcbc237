"""What is written to the entries of a state dict, which are copies here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.tiers.errors import StateError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, config

pytestmark = MARKS

PLACEMENTS = pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def passed(engine: offload.Engine) -> float:
    loss: torch.Tensor = engine.module(torch.ones(2, 4, device=ON)).square().sum()
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return loss.item()


@PLACEMENTS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_to_an_entry_is_written_to_its_parameter(
    placement: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    with offload.initialize(build(), config(tmp_path, placement, precision=precision)) as engine:
        own = engine.module.state_dict()
        own["0.bias"].fill_(2.0)
        own["1.bias"].fill_(3.0)
        assert engine.module.state_dict()["0.bias"].eq(2.0).all()
        own["0.weight"].zero_()
        with torch.no_grad():
            out = engine.module(torch.ones(1, 4, dtype=own["0.bias"].dtype, device=ON))
        again = engine.module.state_dict()
        assert not again["0.weight"].any()
        twos = torch.full((4,), 2.0, dtype=out.dtype, device=ON)
        assert torch.equal(
            out, nn.functional.linear(twos, again["1.weight"], again["1.bias"])[None]
        )
        master = engine.optimizer.state_dict()["state"].get(0, {}).get("master")
        assert master is None or not master.any()


@PLACEMENTS
def test_an_entry_that_is_gone_or_out_of_date_is_refused_once(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        engine.module.state_dict()["0.bias"].fill_(2.0)
        with pytest.raises(StateError, match=r"0\.bias: .*is gone since: .*load_state_dict"):
            passed(engine)
        passed(engine)
        old = engine.module.state_dict()
        passed(engine)
        old["1.bias"].fill_(2.0)
        with pytest.raises(StateError, match=r"1\.bias: .*is not what the parameter was"):
            engine.optimizer.step()
        passed(engine)
        engine.module.load_state_dict(old)
        assert engine.module.state_dict()["1.bias"].eq(2.0).all()


@PLACEMENTS
def test_a_refusal_loses_nothing_of_the_others(placement: dict[str, Any], tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        own = engine.module.state_dict()
        own["0.bias"].fill_(2.0)
        engine.module.state_dict()  # looks first: it is taken over
        engine.module.state_dict()["1.bias"].fill_(3.0)
        own["0.weight"].fill_(4.0)
        with pytest.raises(StateError, match=r"1\.bias: .*is gone since"):
            engine.optimizer.step()
        found = engine.module.state_dict()
        assert found["0.bias"].eq(2.0).all()
        assert found["0.weight"].eq(4.0).all()


@PLACEMENTS
def test_two_copies_of_a_parameter_do_not_undo_each_other(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        one, two = engine.module.state_dict(), engine.module.state_dict()
        one["0.bias"][0] = 2.0
        assert engine.module.state_dict()["0.bias"][0] == 2.0
        two["0.bias"][1] = 3.0
        with pytest.raises(StateError, match=r"0\.bias: .*is not what the parameter was"):
            engine.optimizer.step()
        one["0.bias"][1], three = 3.0, engine.module.state_dict()
        one["0.bias"][2] = three["0.bias"][2] = 4.0
        with pytest.raises(StateError, match=r"0\.bias: .*1 more"):
            engine.optimizer.step()


@PLACEMENTS
def test_a_write_to_the_parameter_is_not_undone_by_one_to_its_copy(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        own = engine.module.state_dict()
        with torch.no_grad():
            engine.module[0].bias.add_(1.0)  # type: ignore[index, union-attr, operator]
        own["0.bias"][0] = 5.0
        with pytest.raises(StateError, match=r"0\.bias: .*is not what the parameter was"):
            engine.optimizer.step()


@PLACEMENTS
def test_a_snapshot_may_be_written_to_and_loaded(placement: dict[str, Any], tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        average = engine.module.state_dict()
        passed(engine)
        for name, value in engine.module.state_dict().items():
            average[name].add_(value).mul_(0.5)
        engine.module.load_state_dict(average)
        found = engine.module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in average.items())
        passed(engine)
        assert not torch.equal(engine.module.state_dict()["0.bias"], average["0.bias"])


def test_copies_for_inference_are_only_read(tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, NVME)) as engine:
        with torch.inference_mode():
            kept = engine.module.state_dict()
        passed(engine)
        assert kept["0.bias"].shape == (4,)


def test_nothing_is_remembered_of_what_nobody_has(tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, NVME)) as engine:
        for _ in range(5):
            engine.module.state_dict()
        passed(engine)
        assert engine.values._given._given == []
