"""An optimizer of the program's own, whose place the engine's takes."""

from __future__ import annotations

from pathlib import Path

import torch

import offload
from offload.optimizers.client import ClientOptimizer
from tests.offload.engine_cases import HOST, assert_same_bits, config


def test_an_empty_param_group_stays_and_a_plain_state_with_it_is_taken_over(tmp_path: Path) -> None:
    """LoRA, where all of a group is frozen: a plain run's state dict has that group."""
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "lr": 0.5}])
    model(torch.ones(1, 3)).sum().backward()
    plain.step()
    plain.zero_grad()
    saved = plain.state_dict()
    client = ClientOptimizer.of(plain)
    keys = {**config(tmp_path, HOST), "optimizer": client.section}
    with offload.initialize(model, keys, parameters=client.groups) as engine:
        client.lend(engine)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.001, 0.5]
        engine.optimizer.load_state_dict(saved)
        loaded = engine.optimizer.state_dict()
        assert [group["params"] for group in loaded["param_groups"]] == [[0, 1], []]
        for number, states in saved["state"].items():
            kept = ("exp_avg", "exp_avg_sq")
            assert_same_bits(
                {name: loaded["state"][number][name] for name in kept},
                {name: states[name] for name in kept},
            )
        engine.save_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved")
