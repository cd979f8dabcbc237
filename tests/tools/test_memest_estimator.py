"""What is said of a case that does not fit: what is short, and only what could be done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offload.cli.plan import _plan
from offload.cli.planned_model import built_in
from offload.config import OffloadConfig
from offload.planning.choice.planner import lay_out_plan
from offload.planning.choice.run_plan import remedy
from offload.planning.choice.solver import Candidate, solve
from offload.planning.plan.estimate import MemoryClass
from offload.planning.plan.plan import Hardware, breakdown, gathered_nbytes, needed_nbytes
from offload.planning.plan.shortfalls import shortfalls
from offload.planning.plan.workload import Workload
from offload.runs.forecast import forecast_of
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.knobs import knobs
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.show import view
from offload.tools.memest.source.read_model import read_stated, read_yaml
from offload.tools.memest.source.stated_sizes import StatedSizes
from tests.tools.estimates import estimate as made_up

GIB = 1 << 30
MODEL = read_stated(StatedSizes(layers=2, hidden=256, vocab=512))
C = MemoryClass


def candidate(checkpoint: object, nvme: str | int) -> Candidate:
    config = OffloadConfig.load(
        {"budget": {"nvme": nvme}, "placement": {"activations": {"checkpoint": checkpoint}}}
    )
    hardware = Hardware(0, GIB, GIB, GIB, kernels_missing="the model computes on the CPU")
    return solve(config, MODEL.shape, hardware).best


def test_what_is_done_already_is_no_remedy() -> None:
    open_, done = candidate(False, 0), candidate(True, 0)
    one, four = Workload(1, 32), Workload(4, 32)
    assert "checkpoint: true" in remedy(C.ACTIVATIONS, Tier.HOST, open_, four)
    assert remedy(C.ACTIVATIONS, Tier.HOST, done, four) == "a smaller batch"
    assert remedy(C.ACTIVATIONS, Tier.HOST, done, one) == "a shorter sequence"


def test_nothing_is_moved_to_a_disk_that_is_not_there() -> None:
    none, some = candidate(True, 0), candidate(True, "512MiB")
    work = Workload(1, 32)
    assert "budget.nvme is 0 B" in remedy(C.OPTIMIZER, Tier.HOST, none, work)
    assert remedy(C.OPTIMIZER, Tier.HOST, some, work) == "set placement.optimizer: nvme"
    assert remedy(C.OPTIMIZER, Tier.NVME, some, work) == "only more disk helps"


@pytest.mark.parametrize("nvme", [0, "512MiB"])
def test_a_budget_that_is_short_names_disk_only_where_there_is_some(nvme: str | int) -> None:
    config = OffloadConfig.load(
        {"budget": {"host": "20MiB", "nvme": nvme}, "placement": {"optimizer": "host"}}
    )
    hardware = Hardware(0, GIB, GIB, GIB, kernels_missing="the model computes on the CPU")
    found = shortfalls(lay_out_plan(config, MODEL.shape, hardware), hardware)
    message = next(each.message for each in found if each.tier is Tier.HOST)
    assert ("raise budget.host or budget.nvme (0 B)" in message) == (nvme == 0)
    assert ("set placement.optimizer: nvme" in message) == (nvme != 0)


def test_the_terms_of_gpu_memory_add_up() -> None:
    config = OffloadConfig.load({"budget": {"device": "1MiB"}, "placement": {"parameters": "host"}})
    plan = lay_out_plan(config, MODEL.shape, Hardware(GIB, GIB, GIB, 0))
    gathered = gathered_nbytes(plan)
    assert gathered > 0
    assert needed_nbytes(plan, Tier.DEVICE) == plan.total(Tier.DEVICE) + gathered
    text = breakdown(plan, Tier.DEVICE)
    assert f"parameters of the unit that runs {format_bytes(gathered)}" in text


def test_a_machine_by_name_is_offered_no_other_gpus() -> None:
    config = OffloadConfig.load(
        {"budget": {"device": "64KiB"}, "placement": {"parameters": "device"}}
    )
    for gpu, offered in (("DGX-2", False), ("V100-32", True)):
        profile = read_profile(gpu=gpu, ram="64GiB", nvme="0")
        case = Case(MODEL, config, Workload(1, 32), profile, None)
        estimator = Estimator()
        found = estimator(case)
        peak_at = estimator.facts(case, found.config).peak_at
        assert Tier.DEVICE in {each.tier for each in found.shortfalls}
        all_knobs = knobs(case, found, peak_at)
        options = {key for knob in all_knobs for option in knob for key in option.settings}
        assert ("--gpu" in options) == offered


MIB = 1 << 20
TIGHT = {  # the fastest plan fits its budgets, but not the RAM: the copies that it keeps fill one
    "device": "cpu", "budget": {"host": "128MiB", "nvme": "2GiB"},
    "placement": {
        "optimizer": "nvme", "parameters": "nvme", "activations": {"checkpoint": "auto"}
    },
    "train": {
        "model": {"layers": 8, "hidden": 256, "heads": 4, "vocab": 1000}, "batch": 8,
        "sequence": 256,
    },
}  # fmt: skip


@pytest.mark.slow
def test_on_a_tight_machine_train_plan_and_memest_choose_the_same_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nbytes, file = 1020 * MIB, tmp_path / "tight.yaml"
    config = OffloadConfig.load(TIGHT)
    file.write_text(config.to_yaml())
    profile = replace(
        read_profile(gpu="none", ram="64GiB", nvme="4GiB"), here=True, ram_nbytes=nbytes,
        ram_free_nbytes=nbytes, own_ram=True,
    )  # fmt: skip
    for module in ("memory.tier_manager", "runs.forecast"):
        monkeypatch.setattr(f"offload.{module}.this_machine", lambda *_: profile.hardware())
    monkeypatch.setattr("offload.runs.forecast.known_speeds", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # libraries of default size

    model = built_in(config)
    trained = forecast_of(model.config, model.shape, model.facts, model.workload)
    shown = _plan(model, 1, 1, 1).solution.best
    source = read_yaml(file)
    found = Estimator()(Case(source, config.owning_the_loop(), model.workload, profile, None))

    assert trained is not None
    assert found.fits
    assert shown.plan == trained.solution.best.plan == found.plan
    for chosen in (shown.config, trained.config, found.config):
        assert chosen.placement.activations.checkpoint is True
    fastest = solve(model.config, model.shape, profile.hardware(), trained.planned.run).best
    assert fastest.fits
    assert fastest.config.placement.activations.checkpoint is False


# ---------------------------------------------------------------- what fits, but is hardly of use
@pytest.mark.parametrize(
    ("tokens_per_s", "life", "said"),
    [
        (3.7, 2089, "fits, but slow: 3.70 tokens/s; the SSD's rated writes last 2,089 steps"),
        (3.7, None, "fits, but slow: 3.70 tokens/s"),
        (400, 50_000, "fits"),
        (12, None, "fits"),
    ],
)
def test_the_verdict_says_what_is_bad_about_a_plan_that_fits(
    tokens_per_s: float, life: int | None, said: str
) -> None:
    case = made_up()
    step = case.step
    assert step is not None
    step = replace(step, seconds=step.tokens / tokens_per_s)
    endurance = 0 if life is None else life * step.written_nbytes
    assert view.verdict(replace(case, step=step, endurance_nbytes=endurance)) == said
