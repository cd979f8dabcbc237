"""`optimizer.type: muon`: torch.optim.Muon's results for matrices of blocks, in every placement."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.deepspeed.migration import migrate
from offload.errors import CheckpointError, ConfigError, OffloadError
from offload.optimizers.client import ClientOptimizer
from offload.planning.plan.sizes import measure, planned_shape
from offload.zero.gradients.norms import clip_coefficient
from offload.zero.groups.parameter_grouping import group_parameters
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)

MIXED = {"parameters": {"host": "50%", "nvme": "50%"}, "gradients": "host",
         "optimizer": {"host": "40%", "nvme": "60%"}}  # fmt: skip
SMALL = {"host": "1MiB", "nvme": "64MiB"}  # less than everything
MUON = {"type": "muon", "lr": 0.02, "adamw_lr": 3e-3, "chunk": 1024}


def matrices_of(model: nn.Module) -> list[Any]:
    return [p for n, p in model.named_parameters() if n.startswith("blocks") and p.ndim == 2]


def engine_of(folder: Path, placement: Any = HOST, **keys: Any) -> offload.Engine:
    keys = {"precision": "fp32", "optimizer": MUON, **keys}
    return offload.initialize(seeded(TinyLM), config(folder, placement, **keys))


def trained(folder: Path, placement: Any = HOST, steps: int = 4, **keys: Any) -> dict[str, Tensor]:
    """All states after some steps, a pass each."""
    with engine_of(folder, placement, **keys) as engine:
        losses_of(engine, batches(steps * keys.get("gradient_accumulation_steps", 1)),
                  keys.get("gradient_accumulation_steps", 1))  # fmt: skip
        return states_of(engine)


def drawn(seed: int) -> dict[str, Any]:
    """Numbers and ways of a run."""
    draw = random.Random(seed)
    muon = {
        "momentum": draw.choice([0.0, 0.3, 0.5, 0.95]), "nesterov": draw.random() < 0.5,
        "ns_steps": draw.choice([1, 3, 5]), "weight_decay": draw.choice([0.0, 0.1]),
        "adjust_lr_fn": draw.choice([None, "original", "match_rms_adamw"]),
        "ns_coefficients": draw.choice([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
    }  # fmt: skip
    clip = draw.choice([None, 0.3])
    ways = {"in_backward": clip is None and draw.random() < 0.5, "adamw_weight_decay": 0.2,
            "chunk": draw.choice([1024, 4096])}  # fmt: skip
    return {
        "muon": muon, "clip_grad_norm": clip, "gradient_accumulation_steps": draw.choice([1, 3]),
        "optimizer": {**MUON, **muon, **ways},
    }  # fmt: skip


@pytest.mark.parametrize("seed", [0, 2, 4, 11])
def test_every_step_is_that_of_torch(seed: int, tmp_path: Path) -> None:
    """Each step of plain PyTorch begins with the engine's weights: in bf16 products a difference
    of one rounding of AdamW's would grow. Then another placement, to the bit."""
    case = drawn(seed)
    muon, passes = case.pop("muon"), case["gradient_accumulation_steps"]
    plain = seeded(TinyLM)
    chosen = set(map(id, matrices_of(plain)))
    rest = [p for p in plain.parameters() if id(p) not in chosen and p.requires_grad]
    others = [
        torch.optim.Muon(matrices_of(plain), lr=MUON["lr"], **muon),
        torch.optim.AdamW(rest, lr=MUON["adamw_lr"], weight_decay=0.2),
    ]  # fmt: skip
    with engine_of(tmp_path, **case) as engine:
        for step in range(3):
            data = batches(passes, seed=step)
            with engine.gathered():
                plain.load_state_dict(engine.module.state_dict())
            losses_of(engine, data, passes)
            for tokens in data:
                (plain.loss(tokens) / passes).backward()
            if case["clip_grad_norm"] is not None:
                norm = torch.tensor(engine.optimizer.last_step.gradient_norm)  # type: ignore[union-attr]
                for param in plain.parameters():
                    if param.grad is not None:
                        param.grad *= clip_coefficient(norm, case["clip_grad_norm"])
            for other in others:
                other.step()
                other.zero_grad()
            with engine.gathered():
                for (name, mine), theirs in zip(
                    engine.module.named_parameters(), plain.parameters(), strict=True
                ):
                    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=name)
    runs = [trained(tmp_path, each, 3, **case) for each in (HOST, NVME, MIXED)]
    case["optimizer"]["chunk"] = 2048
    runs.append(trained(tmp_path, NVME, 3, budget=SMALL, **case))
    for run in runs[1:]:
        assert_same_bits(runs[0], run)


def test_matrices_alone_have_the_bits_of_torch_in_ten_steps(tmp_path: Path) -> None:
    models = [seeded(TinyLM) for _ in range(2)]
    for model in models:
        for param in {*model.parameters()} - {*matrices_of(model)}:
            param.requires_grad_(False)
    plain = torch.optim.Muon(matrices_of(models[0]), lr=0.02)
    for tokens in batches(10):
        models[0].loss(tokens).backward()
        plain.step()
        plain.zero_grad()
    given = ClientOptimizer.of(torch.optim.Muon(matrices_of(models[1]), lr=0.02))
    keys = config(tmp_path, NVME, precision="fp32", optimizer={**given.section, "chunk": 1024})
    with offload.initialize(models[1], keys, parameters=given.groups) as engine:
        losses_of(engine, batches(10))
        assert_same_bits(models[0].state_dict(), engine.module.state_dict())
        saved = engine.optimizer.state_dict()["state"]
        assert [*saved[0]] == ["step", "momentum_buffer"]
        for number, state in plain.state_dict()["state"].items():
            assert torch.equal(saved[number]["momentum_buffer"], state["momentum_buffer"])
        engine.optimizer.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("keys", [
    {"precision": "bf16"}, {"precision": "bf16", "optimizer": {**MUON, "master": "none"}},
    {"precision": "fp16"}, {"precision": "bf16", "optimizer": {**MUON, "states": "bf16"}},
    {"optimizer": {**MUON, "states": "int8", "ns_dtype": "fp32"}},
], ids=str)  # fmt: skip
def test_formats_have_the_same_bits_in_every_placement_and_after_a_resume(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    first = trained(tmp_path, HOST, 4, **keys)
    assert_same_bits(first, trained(tmp_path, NVME, 4, budget=SMALL, **keys))
    data = batches(4)
    with engine_of(tmp_path, MIXED, **keys) as engine:
        losses_of(engine, data[:2])
        engine.save_checkpoint(tmp_path / "saved", wait=False)
        losses_of(engine, data[2:])
        assert engine.checkpoint_saved()
    for placement in (HOST, NVME):
        with engine_of(tmp_path, placement, **keys) as engine:
            engine.load_checkpoint(tmp_path / "saved")
            losses_of(engine, data[2:])
            assert_same_bits(first, states_of(engine))


def test_a_step_with_a_nan_is_skipped_and_leaves_the_momentum(tmp_path: Path) -> None:
    with engine_of(tmp_path, NVME, clip_grad_norm=1.0, skip_nonfinite=True) as engine:
        losses_of(engine, batches(1))
        before = states_of(engine)
        (engine.module.loss(batches(1)[0]) * float("nan")).backward()  # type: ignore[operator]
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert engine.optimizer.step_was_skipped
        assert_same_bits(before, states_of(engine))
        losses_of(engine, batches(2))
        assert all(value.isfinite().all() for value in states_of(engine).values())


def test_a_state_takes_four_bytes_and_groups_say_who_trains_them(tmp_path: Path) -> None:
    keys = config(tmp_path, HOST, precision="fp32", optimizer=MUON)
    loaded = offload.OffloadConfig.load(keys)
    shape = planned_shape(loaded, group_parameters(seeded(TinyLM)).shape())
    sizes = {group.matrices: group for group in measure(loaded, shape)}
    per_element = {
        muon: each.optimizer / each.layout.shard_trainable for muon, each in sizes.items()
    }
    assert 4 <= per_element[True] < 4.6
    assert per_element[False] >= 8
    with engine_of(tmp_path) as engine:
        muon, adamw = engine.optimizer.param_groups
        assert (muon["use_muon"], muon["lr"], muon["momentum"]) == (True, 0.02, 0.95)
        assert (adamw["use_muon"], adamw["lr"], adamw["betas"]) == (False, 3e-3, (0.9, 0.999))
        assert len(muon["params"]) == len(matrices_of(engine.module)) == 8
        assert "Muon trains 8 matrices" in str(engine.report())
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.5
        losses_of(engine, batches(1))


def test_blocks_of_a_model_that_is_one_unit_are_found(tmp_path: Path) -> None:
    model = nn.ModuleDict({"body": seeded(TinyLM), "head": nn.Linear(4, 4)})
    keys = config(tmp_path, HOST, precision="fp32", optimizer=MUON)
    with offload.initialize(model, keys) as engine:
        assert "Muon trains 8 matrices" in str(engine.report())


def test_what_says_use_muon_is_followed(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    model.position.use_muon = True
    model.blocks[0].mlp[0].weight.use_muon = False
    groups = [
        {"params": [*model.blocks[1].parameters()], "lr": 0.5},
        {"params": [model.embed.weight], "use_muon": True},
        {"params": [model.position, *model.blocks[0].mlp.parameters()]},
    ]
    keys = config(tmp_path, HOST, precision="fp32", optimizer=MUON)
    with offload.initialize(model, keys, parameters=groups) as engine:
        said = [(g["use_muon"], len(g["params"]), g["lr"]) for g in engine.optimizer.param_groups]
        assert said == [
            (True, 4, 0.5), (False, 5, 0.5), (True, 1, 0.02), (True, 2, 0.02), (False, 3, 3e-3)
        ]  # fmt: skip
        losses_of(engine, batches(2))


@pytest.mark.parametrize(("groups", "keys", "error", "text"), [
    (lambda m: [{"params": [*m.norm.parameters()], "use_muon": True}], {}, ConfigError,
     r"Muon only supports 2D parameters .* size: \(32,\): norm.weight"),
    (None, {"adamw_lr": 1e-3, "type": "adamw"}, ConfigError, "adamw_lr: needs type: muon"),
    (None, {"ns_dtype": "fp32", "type": "sgd", "adamw_lr": None}, ConfigError,
     "ns_dtype: needs type: muon"),
    (None, {"betas": [0.9, 0.95]}, ConfigError, "betas: muon has none"),
    (None, {"ns_steps": 100}, ConfigError, "ns_steps"),
    (lambda m: [{"params": [*m.parameters()], "adjust_lr_fn": "other"}], {}, ValueError,
     "adjust_lr_fn: expected original or match_rms_adamw"),
])  # fmt: skip
def test_a_mistake_is_named(
    groups: Any, keys: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    model = seeded(TinyLM)
    with pytest.raises(error, match=text):
        offload.initialize(
            model, config(tmp_path, HOST, precision="fp32", optimizer={**MUON, **keys}),
            parameters=groups and groups(model),
        )  # fmt: skip


def test_a_model_without_blocks_is_refused_and_so_is_another_optimizers_checkpoint(
    tmp_path: Path,
) -> None:
    keys = config(tmp_path, HOST, precision="fp32", optimizer=MUON)
    with pytest.raises(ConfigError, match="blocks that repeat, and no such parameter is trained"):
        offload.initialize(nn.Linear(4, 4), keys)
    with engine_of(tmp_path) as engine:
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "saved")
    model = seeded(TinyLM)
    model.position.use_muon = True
    with offload.initialize(model, keys) as engine:
        before = states_of(engine)
        with pytest.raises(CheckpointError, match="position has the optimizer states"):
            engine.load_checkpoint(tmp_path / "saved")
        assert_same_bits(before, states_of(engine))
        engine.optimizer.add_param_group({"params": []})
        with pytest.raises(OffloadError):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_deepspeeds_configuration_is_translated() -> None:
    params = {"lr": 0.01, "adam_lr": 1e-4, "betas": [0.9, 0.9], "weight_decay": 0.1}
    given = {"train_batch_size": 1, "optimizer": {"type": "Muon", "params": params}}
    made = migrate(given, 1).config.optimizer
    assert (made.type, made.lr, made.adamw_lr, made.momentum) == ("muon", 0.01, 1e-4, 0.95)
    assert (made.weight_decay, made.adamw_weight_decay, made.adamw_betas) == (0.1, 0.1, (0.9, 0.9))
    for name in ("muon_lr", "adam_lr"):
        given = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {name: 0.1}}}
        with pytest.raises(ConfigError, match=f"params.{name}: only Muon has it"):
            migrate(given, 1)
