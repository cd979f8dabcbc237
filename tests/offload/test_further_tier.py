"""A tier that only these tests know, a slow memory, is used as the others are: named in the
configuration, with the same bits, in plans and in checkpoints."""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.config import OffloadConfig
from offload.errors import BudgetError, ConfigError
from offload.planning.choice.solver import solve
from offload.planning.plan.plan import Hardware
from offload.tiers.memory import Memory
from offload.tiers.tier import TIERS, Medium, Tier, register
from offload.tools.memest.cli import main as memest_main
from offload.zero.groups.parameter_grouping import group_parameters
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, plan_for_a_gpu, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of

MIB = 1 << 20
SLOW: dict[str, Any] = {"parameters": "slow", "gradients": "slow", "optimizer": "slow"}
SPLIT = {"host": "30%", "slow": "30%", "nvme": "40%"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all": SLOW,
    "parameters": {**HOST, "parameters": "slow"},
    "optimizer, the rest on nvme": {**NVME, "optimizer": "slow"},
    "split": {"parameters": SPLIT, "gradients": SPLIT, "optimizer": SPLIT},
    "activations": {**SLOW, "activations": {"tier": "slow"}},
}


class SlowMemory(Memory):
    """A mapped file: memory that the CPU addresses, and the slower the less of it is cached."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        with tempfile.TemporaryFile() as file:
            file.truncate(nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)

    def tensor(self, offset_bytes: int, nbytes: int) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset_bytes)

    def view(self, offset_bytes: int, nbytes: int) -> memoryview:
        return memoryview(self._map)[offset_bytes : offset_bytes + nbytes]

    @property
    def touched_nbytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        """Nothing to do: the mapping goes with the last tensor over it."""


@pytest.fixture
def slow() -> Iterator[Tier]:
    tier = register(
        Tier(
            name="slow", title="slow memory", medium=Medium.HOST, capacity_nbytes=64 * MIB,
            bytes_per_s=2e10, open_memory=SlowMemory,
        ),
        after=Tier.HOST,
    )  # fmt: skip
    yield tier
    TIERS.remove(tier)


def written(
    folder: Path, placement: dict[str, Any], slow_budget: str = "32MiB", **keys: Any
) -> Path:
    """A YAML file for the slow tier."""
    budget = {"host": "16MiB", "slow": slow_budget, "nvme": "64MiB"}
    optimizer = {"lr": 3e-3, "weight_decay": 0.1, "chunk": 2048}
    values = config(folder, placement, budget=budget, optimizer=optimizer, **keys)
    file = folder / "run.yaml"
    file.write_text(json.dumps(values))
    return file


def train(engine: offload.Engine, first: int = 0) -> dict[str, Tensor]:
    losses_of(engine, batches(8)[first:])
    engine.check_integrity()
    return states_of(engine)


@pytest.fixture(params=["bf16", "fp32"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.sample(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_training_has_the_same_bits(
    tmp_path: Path, slow: Tier, precision: str, placement: str, on_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keys: dict[str, Any] = {"precision": precision, "clip_grad_norm": 0.5}
    with offload.initialize(seeded(TinyLM), written(tmp_path, HOST, **keys)) as engine:
        expected = train(engine)
        assert engine.report().tiers["slow"].peak_nbytes == 0
    if on_gpu:
        plan_for_a_gpu(monkeypatch)
    with offload.initialize(
        seeded(TinyLM), written(tmp_path, PLACEMENTS[placement], **keys)
    ) as engine:
        assert_same_bits(train(engine), expected)
        held, plan = engine.report().tiers["slow"], engine.plan
    placed = {name for name, tier in PLACEMENTS[placement].items() if "slow" in str(tier)}
    assert placed <= held.peak_by_class.keys()
    assert held.peak_nbytes == plan.total(slow) <= held.budget_nbytes == 32 * MIB


@pytest.mark.parametrize(("before", "after"), [(SLOW, HOST), (NVME, SLOW), (SLOW, SLOW)])
def test_checkpoints_go_from_tier_to_tier(
    tmp_path: Path, slow: Tier, before: dict[str, Any], after: dict[str, Any]
) -> None:
    saved = tmp_path / "saved"
    with offload.initialize(seeded(TinyLM), written(tmp_path, before)) as engine:
        losses_of(engine, batches(8)[:4])
        engine.save_checkpoint(saved)
        expected = train(engine, first=4)
    with offload.initialize(seeded(TinyLM, seed=9), written(tmp_path, after)) as engine:
        engine.load_checkpoint(saved)
        assert_same_bits(train(engine, first=4), expected)


def test_a_model_computes_from_it(tmp_path: Path, slow: Tier) -> None:
    tokens = batches(1)[0][:, :-1]
    with torch.no_grad():
        expected = seeded(TinyLM)(tokens)
        with offload.dispatched(
            offload.dispatch(seeded(TinyLM), written(tmp_path, {"parameters": "slow"}))
        ) as dispatched:
            assert torch.equal(dispatched.module(tokens), expected)
            assert dispatched.report().tiers["slow"].by_class["parameters"] > 0


def test_kv_caches_live_in_it(tmp_path: Path, slow: Tier) -> None:
    cases = pytest.importorskip("tests.outside.test_kv_dispatch")
    expected = cases.bits(cases.generated(cases.llama()))
    with cases.dispatched(model := cases.llama(), tmp_path, "slow") as owner:
        assert cases.bits(cases.generated(model)) == expected
        owner.check_integrity()
        assert owner.report().tiers["slow"].peak_by_class["kv"] > 0


SMALL: dict[str, Any] = {"train": {"model": {"layers": 2, "hidden": 64, "heads": 2}}}


def answer(capsys: pytest.CaptureFixture[str], main: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    return said.out


@pytest.mark.parametrize("activations", ["device", "slow"])
def test_memest_knows_it(
    tmp_path: Path, slow: Tier, activations: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {**SLOW, "activations": {"tier": activations}}, **SMALL)
    options = str(file), "--gpu", "none", "--ram", "16GiB", "--no-measure"
    said = json.loads(answer(capsys, memest_main, *options, "--format", "json"))
    held = said["memory"]["slow"]
    assert set(held["by_class"]) >= {"parameters", "gradients", "optimizer"}
    assert ("activations" in held["by_class"]) == (activations == "slow")
    assert held["capacity_nbytes"] == 64 * MIB
    assert said["config"]["budget"]["slow"] == 32 * MIB


def solved(tmp_path: Path, host_nbytes: int, **budget: Any) -> list[str]:
    keys = config(tmp_path, {}, budget=budget, optimizer={"chunk": 2048})
    shape = group_parameters(seeded(TinyLM), ("Block",)).shape()
    chosen = solve(OffloadConfig.load(keys), shape, Hardware(0, host_nbytes, host_nbytes, 1 << 30))
    assert chosen.best.fits
    return [placement.describe() for placement in chosen.best.plan.placements.values()]


def test_the_search_takes_it_before_the_disk(tmp_path: Path, slow: Tier) -> None:
    assert solved(tmp_path, 1 << 30) == ["host"] * 3
    placements = solved(tmp_path, 1 << 30, host="100KiB")
    assert any("slow" in placement for placement in placements)
    assert not any("nvme" in placement for placement in placements)


def test_an_open_budget_is_its_capacity(tmp_path: Path, slow: Tier) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, SLOW)) as engine:
        assert engine.plan.budgets[slow] == slow.capacity_nbytes


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        ("4KiB", r"budget.slow: 4.0 KiB is [\d.]+ KiB short of the [\d.]+ KiB needed .*; raise"),
        (
            "128MiB",
            "budget.slow: 128.0 MiB is more than the 64.0 MiB of slow memory that this process may",
        ),
    ],
)
def test_budgets_that_cannot_work(tmp_path: Path, slow: Tier, budget: str, text: str) -> None:
    with pytest.raises(BudgetError, match=text):
        offload.initialize(seeded(TinyLM), written(tmp_path, SLOW, budget))


def test_a_name_that_sections_have_for_something_else_is_a_tier_all_the_same() -> None:
    tier = register(Tier(name="of", title="far memory", medium=Medium.HOST, capacity_nbytes=MIB))
    try:
        assert OffloadConfig.load({}).budget.of(tier) is None
        assert OffloadConfig.load({"budget": {"of": "64KiB"}}).budget.of(tier) == 64 << 10
    finally:
        TIERS.remove(tier)


def test_its_name_is_unknown_until_it_is_registered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(written(tmp_path, SLOW))
    assert "budget.slow: unknown key; allowed: device, host, nvme" in str(caught.value)
    assert "placement.parameters: 'slow' is not a tier" in str(caught.value)


def test_what_cannot_be_registered(slow: Tier) -> None:
    with pytest.raises(ValueError, match="named slow is registered already"):
        register(slow)
    with pytest.raises(ValueError, match="disks: a further tier has to be host memory"):
        register(Tier(name="disks", title="disks", medium=Medium.FILES, capacity_nbytes=MIB))
    for name in ("", "auto", "slow-memory"):
        with pytest.raises(ValueError, match="cannot be a tier's name in a configuration"):
            register(Tier(name=name, title="far", medium=Medium.HOST, capacity_nbytes=MIB))
