"""What any number of ranks has saved at any stage, any number takes over at any stage, to the bit,
saves again as it was, and trains on from there; also what was saved without its frozen base."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offload
from offload.checkpoint.format.manifest import MANIFEST, RUN, Manifest
from offload.errors import CheckpointError
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    batches,
    bits,
    config,
    losses_of,
    seeded,
    states_of,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import OPTIMIZER

MIXED = {"parameters": "nvme", "gradients": "host", "optimizer": {"host": "50%", "nvme": "50%"}}
PLACEMENTS = (HOST, {**NVME, "gradients": "host"}, MIXED)
BUDGETS = ({"host": "64MiB", "nvme": "64MiB"}, {"host": "4MiB", "nvme": "80MiB"})
ACCUMULATED = 2  # passes per step
Kind = tuple[int, int]  # ranks, stage
Digests = tuple[int, int]  # of what is saved, and two steps behind it


def made(folder: str, precision: str, stage: int, seed: int) -> offload.Engine:
    turn = dist.get_world_size() + stage
    keys = config(
        Path(folder), PLACEMENTS[turn % 3], budget=BUDGETS[turn % 2], precision=precision,
        zero={"stage": stage}, optimizer=OPTIMIZER, clip_grad_norm=0.5,
        gradient_accumulation_steps=ACCUMULATED,
    )  # fmt: skip
    return offload.initialize(seeded(TinyLM, seed=seed), keys)


def digest(engine: offload.Engine) -> int:
    checksum = 0
    for _, tensor in sorted(states_of(engine).items()):
        checksum = zlib.crc32(bits(tensor), checksum)
    return checksum


def train(engine: offload.Engine, *numbers: int) -> None:
    for number in numbers:
        data = batches(ACCUMULATED * dist.get_world_size(), seed=number)
        losses_of(engine, data[dist.get_rank() * ACCUMULATED :][:ACCUMULATED], ACCUMULATED)


def save(folder: str, precision: str, stages: Sequence[int]) -> dict[Kind, Digests]:
    digests, size = {}, dist.get_world_size()
    for stage in stages:
        with made(folder, precision, stage, 0) as engine:
            train(engine, 0, 1)
            engine.save_checkpoint(Path(folder) / f"{size}-{stage}-alone", frozen=False)
            engine.save_checkpoint(Path(folder) / f"{size}-{stage}")
            saved = digest(engine)
            train(engine, 2, 3)
            digests[size, stage] = saved, digest(engine)
    return digests


def load(
    folder: str, precision: str, saved: Sequence[Kind], stages: Sequence[int]
) -> list[dict[Kind, Digests]]:
    """Per stage, of each checkpoint; the last one is saved again before it trains on."""
    digests: list[dict[Kind, Digests]] = []
    for stage in stages:
        with made(folder, precision, stage, 5) as engine:
            digests.append({})
            for ranks, saved_at in saved:
                alone = Path(folder) / f"{ranks}-{saved_at}-alone"
                engine.load_checkpoint(alone)
                then = digest(engine)
                with engine.gathered(base := engine.module.blocks[1].gain), torch.no_grad():
                    base[-1] += 1  # in the shard of the last rank
                with pytest.raises(CheckpointError, match=r"blocks.1.gain differ"):
                    engine.load_checkpoint(alone)
                engine.load_checkpoint(Path(folder) / f"{ranks}-{saved_at}")
                assert then == digest(engine)
                if (ranks, saved_at) == saved[-1]:
                    again = f"again-{dist.get_world_size()}-{stage}"
                    engine.save_checkpoint(Path(folder) / again)
                train(engine, 2, 3)
                digests[-1][ranks, saved_at] = then, digest(engine)
    return digests


def hashes_of(path: Path) -> dict[str, Any]:
    """What each file of states holds, whatever save it is of."""
    manifest = Manifest.from_json((path / MANIFEST).read_bytes(), str(path))
    names = [name for name in manifest.files if name != RUN]
    return {name: (path / name).read_bytes() for name in names}


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_a_checkpoint_fits_any_number_of_ranks_at_any_stage(
    tmp_path: Path, long: bool, precision: str
) -> None:
    if precision != "bf16" and not long:
        pytest.skip("another precision: --long")
    folder, stages = str(tmp_path), tuple(range(4)) if long else (3,)
    saved: dict[Kind, Digests] = {}
    for ranks in (1, 2, 3, 4) if long else (1, 3):
        args = folder, precision, stages
        saved |= run_ranks(ranks, tmp_path, save, *args, timeout_s=400)[0]
    last = list(saved)[-1]
    for ranks in (1, 2, 3, 4) if long else (3,):
        args = folder, precision, list(saved), stages
        each_rank = run_ranks(ranks, tmp_path, load, *args, timeout_s=600)
        for digests in each_rank:
            assert digests == [digests[0]] * len(stages)  # no stage or budget makes a difference
            assert digests == each_rank[0]
            for kind, (then, end) in digests[0].items():
                assert then == saved[kind][0]
                if kind[0] == ranks:  # the run goes on as it would have
                    assert end == saved[kind][1]
        for stage in stages:
            again = tmp_path / f"again-{ranks}-{stage}"
            assert hashes_of(again) == hashes_of(tmp_path / f"{last[0]}-{last[1]}")
