"""What is said of a case that does not fit: what is short, and only what could be done."""

from dataclasses import replace
from pathlib import Path

import pytest

from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.choice.solver import Candidate, solve
from offload.planning.plan.estimate import MemoryClass, Workload
from offload.planning.plan.plan import Hardware, breakdown, gathered_nbytes, needed_nbytes
from offload.planning.plan.shortfalls import shortfalls
from offload.runs.forecast import forecast, workload_of
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.shortfalls import remedy
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.source.read_model import read_stated, read_yaml
from offload.tools.memest.source.stated_sizes import StatedSizes

GIB = 1 << 30
MODEL = read_stated(StatedSizes(layers=2, hidden=256, vocab=512))
C = MemoryClass


def candidate(checkpoint: object, nvme: str | int) -> Candidate:
    config = OffloadConfig.load(
        {"budget": {"nvme": nvme}, "placement": {"activations": {"checkpoint": checkpoint}}}
    )
    hardware = Hardware(0, GIB, GIB, GIB, kernels_missing="the model computes on the CPU")
    return solve(config, MODEL.shape, hardware).best


def test_nothing_is_moved_to_a_disk_that_is_not_there() -> None:
    none, some = candidate(True, 0), candidate(True, "512MiB")
    work = Workload(1, 32)
    assert "budget.nvme is 0 B" in remedy(C.OPTIMIZER, Tier.HOST, none, work)
    assert remedy(C.OPTIMIZER, Tier.HOST, some, work) == "set placement.optimizer: nvme"
    assert remedy(C.OPTIMIZER, Tier.NVME, some, work) == "only more disk helps"


@pytest.mark.parametrize("nvme", [0, "512MiB"])
def test_a_budget_that_is_short_names_disk_only_where_there_is_some(nvme: str | int) -> None:
    config = OffloadConfig.load(
        {
            "budget": {"host": "20MiB", "nvme": nvme}, "placement": {"optimizer": "host"},
            "optimizer": {"chunk": 65536},
        }
    )  # fmt: skip
    hardware = Hardware(0, GIB, GIB, GIB, kernels_missing="the model computes on the CPU")
    lacking = shortfalls(solve(config, MODEL.shape, hardware).best.plan, hardware)
    message = next(each.message for each in lacking if each.tier is Tier.HOST)
    assert ("raise budget.host or budget.nvme (0 B)" in message) == (nvme == 0)
    assert ("move a class of states to nvme" in message) == (nvme != 0)


def test_the_terms_of_gpu_memory_add_up() -> None:
    config = OffloadConfig.load({"budget": {"device": "1MiB"}, "placement": {"parameters": "host"}})
    plan = solve(config, MODEL.shape, Hardware(GIB, GIB, GIB, 0)).best.plan
    gathered = gathered_nbytes(plan)
    assert gathered > 0
    assert needed_nbytes(plan, Tier.DEVICE) == plan.total(Tier.DEVICE) + gathered
    text = breakdown(plan, Tier.DEVICE)
    assert f"parameters of the unit that runs {format_bytes(gathered)}" in text


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
def test_on_a_tight_machine_train_and_memest_choose_the_same_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nbytes, file = 1140 * MIB, tmp_path / "tight.yaml"
    config = OffloadConfig.load(TIGHT)
    file.write_text(config.to_yaml())
    profile = replace(
        read_profile(gpu="none", ram="64GiB", nvme="4GiB"), here=True, ram_nbytes=nbytes,
        ram_free_nbytes=nbytes, own_ram=True,
    )  # fmt: skip
    monkeypatch.setattr("offload.runs.forecast.this_machine", lambda *_: profile.hardware())
    monkeypatch.setattr("offload.runs.forecast.known_speeds", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # libraries of default size

    loop, workload = config.owning_the_loop(), workload_of(config)
    trained = forecast(loop, build_meta_model(config), workload)
    source = read_yaml(file)
    estimate = Estimator()(Case(source, loop, workload, profile, None))

    assert trained is not None
    assert estimate.fits
    assert trained.solution.best.plan == estimate.plan
    for chosen in (trained.config, estimate.config):
        assert chosen.placement.activations.checkpoint == "selective"
    fastest = solve(loop, source.shape, profile.hardware(), trained.planned.run).best
    assert fastest.fits
    assert fastest.config.placement.activations.checkpoint is False
