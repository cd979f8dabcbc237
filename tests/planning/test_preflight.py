"""What the machine cannot do now is refused before anything is allocated."""

import logging
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.config import OffloadConfig
from offload.errors import BudgetError
from offload.memory.preflight import preflight
from offload.planning.choice.solver import solve
from offload.planning.plan.plan import Hardware, Plan
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import GroupShape, ModelShape, UnitShape
from tests.offload.engine_cases import HOST, NVME, TinyLM, config, seeded

MIB, GIB = 1 << 20, 1 << 30
BLOCK = (1024, 1024)


def model(blocks: int = 8) -> ModelShape:
    names = [f"blocks.{index}" for index in range(blocks)]
    groups = tuple(GroupShape(n, (ParamShape((f"{n}.weight",), BLOCK),)) for n in names)
    units = tuple(UnitShape(n, (index,), repeated=True) for index, n in enumerate(names))
    return ModelShape(groups, units)


def plan_of(keys: dict[str, Any]) -> Plan:
    hardware = Hardware(0, 64 * GIB, 64 * GIB, 64 * GIB)
    return solve(OffloadConfig.load(keys), model(), hardware).best.plan


def made_up(root: Path, *, available: int, kind: str = "ext4") -> Path:
    """A machine: RAM that is available, and the file system of everything."""
    files = {
        "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/mountinfo": f"1 0 0:1 / / rw - {kind} /dev/disk rw\n",
    }
    for name, text in files.items():
        path = root / "machine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "machine"


def fly(tmp_path: Path, keys: dict[str, Any], root: Path) -> tuple[str, ...]:
    return preflight(plan_of(keys), [tmp_path], root=root)


def test_ram_that_others_have_taken_is_refused_with_the_missing_bytes(tmp_path):
    keys = {"placement": HOST, "budget": {"host": "1GiB"}}
    assert fly(tmp_path, keys, made_up(tmp_path, available=GIB)) == ()
    with pytest.raises(BudgetError, match=r"budget.host: the plan needs 128.* 28.0 MiB short"):
        fly(tmp_path, keys, made_up(tmp_path, available=100 * MIB))


def test_files_in_ram_count_as_ram(tmp_path):
    keys = {"placement": NVME, "budget": {"host": "128MiB", "nvme": "1GiB"}}
    fly(tmp_path, keys, made_up(tmp_path, available=200 * MIB))
    root = made_up(tmp_path, available=200 * MIB, kind="tmpfs")
    with pytest.raises(BudgetError, match=r"nvme.paths: .* is RAM .* name a folder on a disk"):
        fly(tmp_path, keys, root)


def test_a_budget_that_others_have_taken_is_said(tmp_path):
    keys = {"placement": NVME, "budget": {"host": "1GiB"}}
    (warning,) = fly(tmp_path, keys, made_up(tmp_path, available=512 * MIB))
    assert "budget.host: 1.0 GiB, but 0.5 GiB of RAM are available now" in warning


def test_the_engine_asks_before_it_allocates(tmp_path, monkeypatch, caplog):
    def full(*args: Any, **kwargs: Any) -> tuple[str, ...]:
        raise BudgetError("budget.host: nothing is left")

    def allocate(*args: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr("offload.tiered_model.preflight", full)
    monkeypatch.setattr("offload.tiered_model.TierManager", allocate)
    with pytest.raises(BudgetError, match="nothing is left"):
        offload.initialize(seeded(TinyLM), config(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr("offload.tiered_model.preflight", lambda *a, **k: ("slow disk",))
    with caplog.at_level(logging.WARNING), offload.initialize(seeded(TinyLM), config(tmp_path)):
        assert "slow disk" in caplog.text
