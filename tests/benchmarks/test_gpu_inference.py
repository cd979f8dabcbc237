"""What `make gpu-check` generates and times from the tiers, with host memory in the GPU's place."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import gpu_passes
from benchmarks.generation import dispatch
from benchmarks.gpu_inference import Generation
from benchmarks.gpu_passes import COMPUTE, LINK, LONGEST, NAMED, OURS, choose, options_of, run_pass
from benchmarks.gpu_sizes import GIB
from offload.bench.record import Record
from offload.config import OffloadConfig
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.zero.groups.group import ParamGroup
from tests.benchmarks.gpu_check_cases import H200, MACHINES
from tests.offload.order_cases import on_a_checked_device

SAMPLE = ("weights on device", "weights on {", "int4 on device", "in bf16 on nvme", "in int8")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Host memory in the GPU's place. A GPU multiplies nothing straight from codes."""
    on_a_checked_device(monkeypatch)
    never = property(lambda group: False, lambda group, value: None)
    monkeypatch.setattr(ParamGroup, "is_lazy", never, raising=False)
    return torch.device("cpu")


@pytest.fixture
def generation(device: torch.device, tmp_path: Path) -> Generation:
    return Generation(device, tmp_path)


def test_what_is_generated_has_the_bits_of_the_model_in_memory(
    generation: Generation, long: bool
) -> None:
    checks = generation.checks()
    assert len(checks) == 13
    for name, check in checks.items():
        if long or any(part in name for part in SAMPLE):
            assert check() == "", name


def test_logits_that_differ_are_named(generation: Generation, monkeypatch: Any) -> None:
    real = generation._logits

    def changed(model: Any) -> list[torch.Tensor]:
        logits = real(model)
        logits[2][0, 0] += 0.5
        return logits

    monkeypatch.setattr(generation, "_plain", lambda values: changed(generation._model))
    found = generation.check({"parameters": "nvme"})
    assert found.startswith("the logits of token 2 are not the same: up to 0.5")


# ---------------------------------------------------------------- sizes of the large pass
def test_host_memory_and_time_choose_the_model() -> None:
    choice, refused = choose(H200, 380.0)
    assert choice is not None
    assert choice.case.name == "39 B"
    assert choice.numel == pytest.approx(39e9, rel=0.05)
    (why,) = refused
    assert why.startswith("70 B: needs ")
    assert "more RAM than there is" in why
    assert choice.config["budget"]["device"] == 24 * GIB
    shorter, refused = choose(H200, 140.0)
    assert shorter is not None
    assert shorter.case.name == "13 B"
    assert shorter.estimated_s <= 140
    assert "39 B: would take about" in refused[1]
    server, refused = choose(dataclasses.replace(H200, host_nbytes=200 * GIB), 600.0)
    assert server is not None
    assert (server.case.name, refused) == ("70 B", ())


def test_175_billion_in_codes_are_taken_on_request() -> None:
    choice, refused = choose(H200, 60.0, "175 B int4")
    assert choice is not None, refused
    assert choice.numel == pytest.approx(175e9, rel=0.02)
    assert choice.case.share == 0.85
    none, (why,) = choose(MACHINES["a desktop"], 1e6, "175 B int4")
    assert none is None
    assert "more RAM" in why


@pytest.mark.parametrize("name", ["a desktop", "a laptop"])
def test_the_planner_accepts_what_is_chosen(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    choice, _ = choose(machine, 600.0)
    assert choice is not None
    config = OffloadConfig.load({**choice.config, "nvme": {"paths": [str(tmp_path)]}})
    hardware = Hardware(
        machine.device_nbytes, machine.host_nbytes, machine.host_nbytes, machine.disk_nbytes
    )
    plan = make_plan(config.for_inference(), gpu_passes.shape_of(choice.case.shape), hardware)
    assert not plan.uses_nvme


# ---------------------------------------------------------------- the pass itself
class Answers(list[dict[str, Any]]):
    """What a parent is told."""

    answer = list.append


@pytest.mark.parametrize("storage", [None, "int4"])
def test_a_pass_is_held_against_what_it_copied(
    storage: str | None, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.generation._PATTERN_NUMEL", 1001)
    choice, _ = choose(H200, 600.0, "0.02 B")
    assert choice is not None
    case = dataclasses.replace(NAMED["0.02 B"], storage=storage)
    config = {
        **gpu_passes.settings(case, 4 << 20, 16 << 20), "device": str(device),
    }  # fmt: skip
    choice = dataclasses.replace(choice, case=case, config=config)
    options = {
        **options_of(choice, H200, str(tmp_path)), "batch": 4, "rounds": 2, "copy_nbytes": 1 << 20,
    }  # fmt: skip
    told = Answers()
    run_pass(options, told)  # type: ignore[arg-type]
    record = Record.from_dict(told[-1])
    assert [row.name for row in record.rows] == [OURS, LINK, COMPUTE, LONGEST]
    ours = record.measured(OURS)
    assert ours is not None
    values = 2 * choice.numel
    # codes fit in the device's memory beside a block's values
    least, most = (values - (4 << 20), values) if storage is None else (0, values // 3)
    assert all(least <= moved <= most for moved in ours.values("read_nbytes"))
    (ratio,) = record.ratios
    assert (ratio.of, ratio.to) == (LONGEST, OURS)
    assert 0 < ratio.median < 1
    assert not any("DIFFER" in note for note in record.notes)


def test_quick_values_are_one_block_repeated_and_norms_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.generation._PATTERN_NUMEL", 1001)
    config = {
        "device": "cpu", "precision": "bf16", "placement": {"parameters": "host"},
        "budget": {"host": "16MiB"},
    }  # fmt: skip
    with ExitStack() as stack:
        values = dispatch("small", config, stack).state_dict()
    assert torch.equal(values["model.norm.weight"], torch.ones(256, dtype=torch.bfloat16))
    for name in ("model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"):
        flat = values[name].flatten()
        assert torch.equal(flat[:1001], flat[1001:2002])
        assert flat.float().std().item() == pytest.approx(0.02, rel=0.1)
