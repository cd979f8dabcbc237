"""Frozen weights in 8 and 4 bits: a model computes with the dequantized values, to the bit,
wherever the weights live."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import OffloadConfig
from offload.errors import BudgetError, ConfigError, ModifiedError, UnsupportedError
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.planning.step.memory import find_copies
from offload.tiers.tier import Tier
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import GroupShape, ModelShape
from offload.zero.groups.parameter_grouping import group_parameters
from tests.offload.engine_cases import DEVICE, HOST, NVME, batches, config, min_budget
from tests.offload.engine_states import assert_same_bits, bits, gradients_of, losses_of, states_of
from tests.offload.storage_cases import (
    FORMATS,
    WIDTH,
    AdaptedLM,
    adapted,
    dequantized,
    frozen_of,
    in_precision,
    round_to,
    stored,
)

PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": NVME, "host": HOST, "device": DEVICE,
    "mixed": {**HOST, "parameters": {"host": "50%", "nvme": "50%"}},
}  # fmt: skip


def quantized(folder: Path, weights: str, placement: str = "nvme", **keys: Any) -> dict[str, Any]:
    storage = {"weights": weights, "group_size": 32, **keys.pop("storage", {})}
    return config(folder, PLACEMENTS[placement], storage=storage, **keys)


def train(model: nn.Module, keys: dict[str, Any], steps: int = 3) -> tuple[Any, Any]:
    """Losses, and all states at the end."""
    with offload.initialize(model, keys) as engine:
        losses = losses_of(engine, batches(steps))
        engine.check_integrity()
        states = {name: value.clone() for name, value in model.state_dict().items()}
        for name, param in model.named_parameters():
            state = engine.values.read_state(param)
            states |= {f"{name} {key}": value for key, value in state.items()}
        return losses, states


@pytest.mark.parametrize("weights", FORMATS)
def test_a_dispatched_model_computes_with_the_dequantized_values_from_every_tier(
    weights: str, tmp_path: Path
) -> None:
    plain = in_precision(adapted().requires_grad_(False), "bf16")
    models = [copy.deepcopy(plain) for _ in PLACEMENTS]
    round_to(plain, weights)
    tokens = batches(1)[0]
    for model, placement in zip(models, PLACEMENTS, strict=True):
        offload.dispatch(model, quantized(tmp_path, weights, placement, precision="bf16"))
        with torch.no_grad(), offload.dispatched(model) as owner:
            for _ in range(2):
                assert bits(model(tokens)) == bits(plain(tokens)), placement
            assert all(
                bits(value) == bits(plain.state_dict()[name])
                for name, value in model.state_dict().items()
            )
            owner.check_integrity()


@pytest.mark.parametrize(("weights", "precision"), [("nf4", "bf16"), ("int4", "fp32")])
def test_adapters_train_alike_on_codes_in_every_tier_and_on_dequantized_values(
    weights: str, precision: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"precision": precision, "clip_grad_norm": 0.5}
    plain = adapted()
    round_to(plain, weights, precision=precision)
    expected = train(copy.deepcopy(plain), config(tmp_path, HOST, **keys))
    for placement in PLACEMENTS:
        actual = train(adapted(), quantized(tmp_path, weights, placement, **keys))
        assert actual[0] == expected[0], placement
        assert_same_bits(actual[1], expected[1])
    # the same in plain PyTorch
    with offload.initialize(adapted(), quantized(tmp_path, weights, "nvme", **keys)) as engine:
        model: Any = engine.module
        loss = model.loss(batches(1)[0])
        loss.backward()
        in_precision(plain, precision)
        plain_loss = plain.loss(batches(1)[0])
        plain_loss.backward()
        assert bits(loss) == bits(plain_loss)
        named = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert_same_bits(gradients_of(engine), named)


def test_a_fuzz_of_models_formats_and_places(tmp_path: Path, long: bool) -> None:
    for seed in range(24 if long else 3):
        chance = random.Random(seed)
        blocks, tied = chance.choice([2, 3, 5]), chance.random() < 0.5
        weights, precision = chance.choice(FORMATS), chance.choice(["fp32", "bf16"])
        skip = chance.choice([("lm_head",), (), ("lm_head", "up"), ("layers.0.down",)])
        keys: dict[str, Any] = {
            "precision": precision,
            "prefetch": chance.choice([0, 1, 3]),
            "optimizer": {"lr": 1e-2, "chunk": chance.choice([1024, 4096])},
        }
        plain = adapted(blocks, tied=tied)
        round_to(plain, weights, skip, precision)
        expected = train(plain, config(tmp_path, HOST, **keys), 2)
        home: dict[str, Any] = {
            name: chance.choice(["nvme", "host", {"host": "30%", "nvme": "70%"}])
            for name in ("parameters", "gradients", "optimizer")
        }
        keys["storage"] = {"weights": weights, "group_size": 32, "skip": list(skip)}
        keys = config(tmp_path, home, **keys)

        def build(blocks: int = blocks, tied: bool = tied) -> nn.Module:
            return AdaptedLM(blocks, tied=tied)

        if chance.random() < 0.5:
            keys["budget"] = min_budget(build, keys)
        actual = train(adapted(blocks, tied=tied), keys, 2)
        assert actual[0] == expected[0], (seed, keys)
        assert_same_bits(actual[1], expected[1])


def test_matrices_that_are_frozen_are_stored_apart_from_what_is_trained() -> None:
    grouping = stored(adapted(1))
    groups = {group.name: group for group in grouping.groups}
    assert list(groups) == ["embed", "layers.0", "layers.0, int4", "lm_head"]
    names = [param.name for param in groups["layers.0"].params]
    assert names == ["layers.0.up.a.weight", "layers.0.up.b.weight"]
    formats = {
        param.names[0].removeprefix("layers.0."): param.stored
        for param in groups["layers.0, int4"].params
    }
    assert {name for name, stored in formats.items() if stored} == {"up.base.weight", "down.weight"}
    assert formats["norm.weight"] is formats["up.base.bias"] is None
    assert not any(param.stored for param in groups["lm_head"].params)
    units = {unit.name: unit.groups for unit in grouping.units}
    assert units["layers.0"] == [1, 2]


def test_a_tied_weight_stays_if_one_of_its_names_is_skipped() -> None:
    first = stored(adapted(1, tied=True)).groups[0]
    assert not any(param.stored for param in first.params)
    first = stored(adapted(1, tied=True), skip=["up"]).groups[0]
    assert all(param.stored for param in first.params)


def test_it_trains_under_a_budget_smaller_than_the_weights(tmp_path: Path) -> None:
    keys = quantized(tmp_path, "nf4", "nvme", precision="bf16", optimizer={"chunk": 1024})
    keys["budget"] = min_budget(lambda: AdaptedLM(12), keys)
    model = adapted(12)
    values = 2 * sum(param.numel() for param in model.parameters())
    with offload.initialize(model, keys) as engine:
        losses_of(engine, batches(2))
        host = engine.report().tiers["host"]
        assert host.peak_nbytes <= host.budget_nbytes < values
        groups = [g for g in engine.plan.groups if g.dequantized and g.name != "embed"]
        assert all(0.25 < group.parameters / group.dequantized < 0.55 for group in groups)  # pages


@pytest.mark.sample(4)
@pytest.mark.parametrize("placement", ["nvme", "host"])
@pytest.mark.parametrize("share", [None, 1.5])
def test_peaks_are_predicted(placement: str, share: float | None, tmp_path: Path) -> None:
    keys = quantized(tmp_path, "int4", placement, optimizer={"chunk": 1024})
    if share is not None:
        smallest = min_budget(lambda: AdaptedLM(8), keys)
        keys["budget"] = {**smallest, "host": f"{int(float(smallest['host'][:-3]) * share)}KiB"}
    model = adapted(8)
    with offload.initialize(model, keys) as engine:
        losses_of(engine, batches(4))
        plan, shape = engine.plan, stored(adapted(8)).shape()
        beside = plan.total(Tier.HOST)
        copies = find_copies(plan, engine.config, shape, 1)
        measured = engine.report().tiers["host"].peak_nbytes
    assert beside + copies.nbytes == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_what_is_written_is_rounded_and_the_rest_keeps_its_codes(
    placement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offload.initialize(adapted(2), quantized(tmp_path, "int4", placement)) as engine:
        before = frozen_of(engine)
        model: Any = engine.module
        weight = model.layers[1].down.weight
        new = torch.randn(weight.shape)
        with caplog.at_level(logging.WARNING, "offload"), engine.gathered(weight), torch.no_grad():
            weight.copy_(new)
        assert "down.weight, stored in int4, was written" in caplog.text
        after = frozen_of(engine)
        name = "layers.1.down.weight"
        chosen = engine.config.stored
        assert chosen is not None
        assert after.pop(name) == bits(dequantized(new, chosen.format)) != before.pop(name)
        assert after == before


@pytest.mark.sample(3)
@pytest.mark.parametrize("weights", FORMATS)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(
    weights: str, tmp_path: Path
) -> None:
    keys = quantized(tmp_path, weights, "nvme", precision="bf16")
    with offload.initialize(adapted(), keys) as engine:
        losses_of(engine, batches(2))
        engine.save_checkpoint(tmp_path / "checkpoint")
        expected = losses_of(engine, batches(3, 5)), states_of(engine)
    other = adapted()
    with torch.no_grad():
        for param in other.parameters():
            param.normal_()  # another model's values: all that counts is the checkpoint
    for keys_there in (keys, quantized(tmp_path, weights, "host", precision="bf16")):
        with offload.initialize(copy.deepcopy(other), keys_there) as engine:
            engine.load_checkpoint(tmp_path / "checkpoint")
            assert losses_of(engine, batches(3, 5)) == expected[0]
            assert_same_bits(states_of(engine), expected[1])
    # without storage it has the dequantized values; they are what an export has, too
    with offload.initialize(other, config(tmp_path, HOST, precision="bf16")) as engine:
        engine.load_checkpoint(tmp_path / "checkpoint")
        assert losses_of(engine, batches(3, 5)) == expected[0]


def test_a_checkpoint_of_exact_weights_is_rounded_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offload.initialize(adapted(1), config(tmp_path, HOST)) as engine:
        engine.save_checkpoint(tmp_path / "exact")
    with offload.initialize(adapted(1), quantized(tmp_path, "nf4", "host")) as engine:
        before = frozen_of(engine)
        with caplog.at_level(logging.WARNING, "offload"):
            engine.load_checkpoint(tmp_path / "exact")
        assert "its weights are rounded to this engine's nf4" in caplog.text
        assert frozen_of(engine) == before


def refused(folder: Path, model: nn.Module, **storage: Any) -> str:
    keys = {"weights": "int4", "group_size": 32, **storage}
    with pytest.raises(ConfigError) as error:
        offload.initialize(model, config(folder, HOST, storage=keys))
    return str(error.value)


def test_what_cannot_be_stored_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    model = adapted(1)
    assert "all parameters are trained" in refused(tmp_path, adapted(1).requires_grad_(True))
    assert "names no module" in refused(tmp_path, model, skip=["lm_hed"])
    assert "every frozen matrix is skipped" in refused(
        tmp_path, model, skip=["embed", "layers.*", "lm_head"]
    )
    assert "rows of 64 elements are no whole groups of 256" in refused(
        tmp_path, model, group_size=256
    )
    norm = nn.Sequential(nn.LayerNorm(4).requires_grad_(False), nn.Linear(4, 4))
    assert "no frozen parameter is a matrix" in refused(tmp_path, norm)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e5])
def test_weights_that_are_not_finite_in_the_precision_are_refused(
    value: float, tmp_path: Path
) -> None:
    model = adapted(1)
    with torch.no_grad():
        model.layers[0].down.weight[3, 5] = value
    with pytest.raises(UnsupportedError, match=r"layers\.0\.down\.weight .* in fp16"):
        offload.initialize(model, quantized(tmp_path, "int8", "host", precision="fp16"))


def test_an_adapter_that_is_frozen_is_not_rounded(tmp_path: Path) -> None:
    """PEFT's names, for inference."""

    class Tuner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(WIDTH, WIDTH)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 32, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(32, WIDTH, bias=False)})
            self.hada_w1_a = nn.ParameterDict({"default": torch.randn(WIDTH, 32)})
            self.prompt_encoder = nn.ModuleDict({"default": nn.Embedding(4, WIDTH)})
            self.modules_to_save = nn.ModuleDict({"default": nn.Linear(WIDTH, WIDTH)})

    model = nn.Sequential(Tuner())
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    offload.dispatch(model, quantized(tmp_path, "int4", "host"))
    with offload.dispatched(model):
        same = {n for n, p in model.state_dict().items() if torch.equal(p, expected[n])}
    assert same == expected.keys() - {"0.base_layer.weight"}


def test_experts_that_are_adapted_one_by_one_are_refused() -> None:
    from offload.kernels.weight_formats import QuantType, WeightFormat
    from offload.zero.groups.storage import Storage

    params = (ParamShape(("m.experts.0.base",), (64, 64), False), ParamShape(("lora",), (4, 64)))
    shape = ModelShape((GroupShape("m.experts.0", params, table="m.experts"),), ())
    storage = Storage(WeightFormat(QuantType.INT4, 32))
    with pytest.raises(UnsupportedError, match="add m\\.experts to"):
        shape.stored(storage)


def test_a_model_that_only_fits_in_codes_is_not_refused(tmp_path: Path) -> None:
    model = adapted(40).requires_grad_(False)
    values = 2 * sum(param.numel() for param in model.parameters())
    keys = {"precision": "bf16", "budget": {"host": "256KiB"}, "placement": {"parameters": "nvme"}}
    chosen = OffloadConfig.load({**keys, "storage": {"weights": "int4", "group_size": 32}})
    there = Hardware(0, 512 << 10, 512 << 10, int(0.6 * values))
    plain = OffloadConfig.load(keys).for_inference()
    with pytest.raises(BudgetError, match="short of the"):
        make_plan(plain, group_parameters(model).shape(), there)
    shape = group_parameters(model).stored(chosen.stored).shape()
    plan = make_plan(chosen.for_inference(), shape, there)
    assert plan.total(Tier.NVME) < 0.5 * values


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_refused_and_nothing_is_lost(value: float, tmp_path: Path) -> None:
    with offload.initialize(adapted(1), quantized(tmp_path, "int8")) as engine:
        before = frozen_of(engine)
        model: Any = engine.module
        weight = model.layers[0].down.weight
        with (
            pytest.raises(UnsupportedError, match=r"down\.weight has values that are infinite"),
            engine.gathered(weight),
            torch.no_grad(),
        ):
            weight[0, 0] = value
        assert frozen_of(engine) == before
        assert all(torch.isfinite(torch.tensor(losses_of(engine, batches(1)))))


@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_codes_written_between_forward_and_backward_are_an_error(
    placement: str, tmp_path: Path
) -> None:
    model = adapted(1)
    with offload.initialize(model, quantized(tmp_path, "int4", placement)):
        block = model.layers[0]
        x = torch.randn(2, 5, WIDTH, requires_grad=True)
        loss = block(x).sum()
        with torch.no_grad():
            block.down.bias.add_(1)  # backward does not need it
        loss.backward()
        loss = block(x).sum()
        with torch.no_grad():
            block.down.weight.add_(1)
        with pytest.raises(ModifiedError, match=r"layers\.0\.down\.weight"):
            loss.backward()
        block(x).sum().backward()
