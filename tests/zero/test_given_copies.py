"""What is written to the entries of a state dict, which are copies here."""

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
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_written_entry_is_refused_once(
    placement: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        own = engine.module.state_dict()
        own["0.bias"].fill_(2.0)
        own["1.bias"][0] = 2.0
        if not is_kept:
            del own
        with pytest.raises(StateError, match=r"0\.bias: .*1 more.*load_state_dict"):
            passed(engine)
        passed(engine)
        old = engine.module.state_dict()
        passed(engine)
        old["1.bias"].fill_(2.0)
        with pytest.raises(StateError, match=r"1\.bias: .*was written to"):
            engine.optimizer.step()
        engine.module.load_state_dict(old)
        assert engine.module.state_dict()["1.bias"].eq(2.0).all()


@PLACEMENTS
def test_a_snapshot_may_be_written_to_and_loaded(placement: dict[str, Any], tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        average = engine.module.state_dict()
        passed(engine)
        for name, value in engine.module.state_dict().items():
            average[name].add_(value).mul_(0.5)
        engine.module.load_state_dict(average)
        loaded = engine.module.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in average.items())
        passed(engine)
        assert not torch.equal(engine.module.state_dict()["0.bias"], average["0.bias"])


@PLACEMENTS
def test_a_written_entry_that_a_load_leaves_out_is_refused(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    with offload.initialize(build(), config(tmp_path, placement)) as engine:
        own = engine.module.state_dict()
        own["0.bias"].fill_(2.0)
        own["1.bias"].fill_(2.0)
        part = {"1.bias": own["1.bias"]}
        with pytest.raises(StateError, match=r"^0\.bias: (?!.*more)"):
            engine.module.load_state_dict(part, strict=False)
        nn.ModuleDict({"model": engine.module}).load_state_dict(
            {f"model.{name}": value for name, value in part.items()}, strict=False
        )
        assert engine.module.state_dict()["1.bias"].eq(2.0).all()
