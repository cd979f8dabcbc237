"""What any number of ranks has saved at any stage, any number takes over at any stage, to the bit,
and saves again as it was."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload
from offload.checkpoint.manifest import MANIFEST, RUN, Manifest
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, bits, config, seeded, states_of
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER

MIXED = {"parameters": "nvme", "gradients": "host", "optimizer": {"host": "50%", "nvme": "50%"}}
PLACEMENTS = (HOST, NVME, MIXED)
Kind = tuple[int, int]  # ranks, stage


def made(folder: str, stage: int, seed: int) -> offload.Engine:
    torch.set_num_threads(1)
    placement = PLACEMENTS[(dist.get_world_size() + stage) % 3]
    keys = config(
        Path(folder), placement, budget=BUDGET, precision="bf16", zero={"stage": stage},
        optimizer=OPTIMIZER, clip_grad_norm=0.5,
    )  # fmt: skip
    return offload.initialize(seeded(TinyLM, seed=seed), keys)


def digest(engine: offload.Engine) -> int:
    found = 0
    for _, tensor in sorted(states_of(engine).items()):
        found = zlib.crc32(bits(tensor), found)
    return found


def save(folder: str, stages: Sequence[int]) -> dict[Kind, int]:
    found, size = {}, dist.get_world_size()
    for stage in stages:
        with made(folder, stage, 0) as engine:
            for number in range(2):
                tokens = batches(size, seed=number)[dist.get_rank()]
                engine.backward(engine.module.loss(tokens))  # type: ignore[operator]
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            engine.save_checkpoint(Path(folder) / f"{size}-{stage}")
            found[size, stage] = digest(engine)
    return found


def load(folder: str, saved: Sequence[Kind], stages: Sequence[int]) -> list[dict[Kind, int]]:
    """Per stage, of each checkpoint; the last one is saved again."""
    found: list[dict[Kind, int]] = []
    for stage in stages:
        with made(folder, stage, 5) as engine:
            found.append({})
            for ranks, saved_at in saved:
                engine.load_checkpoint(Path(folder) / f"{ranks}-{saved_at}")
                found[-1][ranks, saved_at] = digest(engine)
            engine.save_checkpoint(Path(folder) / f"again-{dist.get_world_size()}-{stage}")
    return found


def hashes_of(path: Path) -> dict[str, Any]:
    """What each file of states holds, whatever save it is of."""
    manifest = Manifest.from_json((path / MANIFEST).read_bytes(), str(path))
    names = [name for name in manifest.files if name != RUN]
    return {name: (path / name).read_bytes() for name in names}


def test_a_checkpoint_fits_any_number_of_ranks_at_any_stage(tmp_path: Path, long: bool) -> None:
    folder, stages = str(tmp_path), tuple(range(4)) if long else (0, 2)
    saved: dict[Kind, int] = {}
    for ranks in (1, 2, 3, 4) if long else (1, 3):
        saved |= run_ranks(ranks, tmp_path, save, folder, stages, timeout_s=200)[0]
    last = list(saved)[-1]
    for ranks in (1, 2, 3, 4) if long else (2,):
        for found in run_ranks(ranks, tmp_path, load, folder, list(saved), stages, timeout_s=400):
            assert found == [saved] * len(stages)
        for stage in stages:
            again = tmp_path / f"again-{ranks}-{stage}"
            assert hashes_of(again) == hashes_of(tmp_path / f"{last[0]}-{last[1]}")
