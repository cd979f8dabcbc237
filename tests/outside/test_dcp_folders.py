"""Weights in folders of torch.distributed.checkpoint; an engine loads what others have saved."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typer.testing import CliRunner

import offload
from offload.cli.app import app
from offload.errors import CheckpointError, NoCheckpointError, PathError
from offload.integrations.dcp_import import import_dcp
from offload.integrations.distributed_checkpoint import EngineState
from tests.offload.engine_cases import assert_same_bits, seeded
from tests.outside.test_distributed_checkpoint import Flat, Net, settings, train


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group: DCP says that it assumes one process
        yield


@pytest.mark.parametrize("nested", [True, False])
def test_weights_alone_become_a_safetensors_file(nested: bool, tmp_path: Path) -> None:
    weights = seeded(Net).state_dict()
    optimizer = {"state": {"first.weight": {"exp_avg": torch.ones(1)}}, "note": "none"}
    given = {"app": {"model": weights, "optim": optimizer}} if nested else weights
    dcp.save(given, checkpoint_id=tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "out.safetensors")
    assert_same_bits(load_file(tmp_path / "out.safetensors"), dict(weights))
    with pytest.raises(PathError, match="exists"):
        import_dcp(tmp_path / "dcp", tmp_path / "out.safetensors")


def test_what_is_no_folder_of_one_model_is_refused(tmp_path: Path) -> None:
    where, out = tmp_path / "dcp", tmp_path / "out.safetensors"
    with pytest.raises(NoCheckpointError, match=r"that dcp\.save wrote"):
        import_dcp(tmp_path, out)
    dcp.save({"a": {"model": {"x": torch.ones(1)}}, "b": {"model": {"x": torch.ones(1)}}},
             checkpoint_id=where)  # fmt: skip
    with pytest.raises(CheckpointError, match="2 models"):
        import_dcp(where, out)
    with pytest.raises(PathError, match=r"then engine\.save_checkpoint"):
        import_dcp(where, tmp_path / "ours")
    (where / ".metadata").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        import_dcp(where, out)
    assert sorted(tmp_path.iterdir()) == [where]


def test_a_damaged_part_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    where = tmp_path / "dcp"
    dcp.save({"model": {"x": torch.ones(4)}}, checkpoint_id=where)
    next(where.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.x cannot be read"):
        import_dcp(where, tmp_path / "out.safetensors")
    assert sorted(tmp_path.iterdir()) == [where]


def test_parts_that_do_not_make_a_whole_are_refused(tmp_path: Path) -> None:
    where = tmp_path / "dcp"
    dcp.save({"model": {"x": torch.ones(4)}}, checkpoint_id=where)
    metadata = pickle.loads((where / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.x"].chunks[:] = [
        ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    ]
    (where / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"model\.x: its parts do not make a whole"):
        import_dcp(where, tmp_path / "out.safetensors")
    assert sorted(tmp_path.iterdir()) == [where]


def test_the_command(tmp_path: Path) -> None:
    dcp.save({"model": seeded(Net).state_dict()}, checkpoint_id=tmp_path / "dcp")
    command = ["checkpoint", "import-dcp", str(tmp_path / "dcp"), str(tmp_path / "o.safetensors")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "--trust" in refused.output
    result = CliRunner().invoke(app, [*command, "--trust"])
    assert result.exit_code == 0, result.output


def test_sharded_tensors_are_put_together(tmp_path: Path) -> None:
    """As several ranks write them: a file and parts each."""
    value = torch.randn(5, 6)
    boxes = [((0, 0), (2, 6)), ((2, 0), (3, 4)), ((2, 4), (3, 2))]
    places, chunks = {}, []
    for number, (offsets, sizes) in enumerate(boxes):
        part = value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        buffer = io.BytesIO()
        torch.save(part.t().contiguous().t(), buffer)  # strides of its own
        (tmp_path / f"__{number}_0.distcp").write_bytes(buffer.getvalue())
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[MetadataIndex("w", offsets)] = _StorageInfo(
            f"__{number}_0.distcp", 0, len(buffer.getvalue())
        )
    entry = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)
    raw = pickle.dumps(Metadata({"w": entry}, {"w": ("w",)}, places))
    (tmp_path / ".metadata").write_bytes(raw)
    import_dcp(tmp_path, tmp_path / "out.safetensors")
    assert_same_bits(load_file(tmp_path / "out.safetensors"), {"w": value})


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("optim", "param_groups", 0, "lr"), "evil", "lr is 'evil'"),
        (("optim", "param_groups", 0, "lr"), float("nan"), "learning rate"),
        (("optim", "param_groups", 0, "betas"), (0.9, 1.0), "beta"),
        (("optim", "state", "layers.0.weight", "step"), torch.tensor(float("nan")), "nan times"),
        (("optim", "state", "layers.0.weight", "step"), torch.tensor(-1.0), "-1.0 times"),
        (("optim", "state", "layers.0.weight", "step"), "3", "is no tensor in the checkpoint"),
        (("optim", "state", "layers.0.weight", "exp_avg"), 0.0, "is no tensor in the checkpoint"),
        (("model", "layers.0.weight"), [torch.ones(16, 8)], "Missing key"),
        (("model", "layers.0.weight"), (torch.ones(16, 8),), "is no tensor in the checkpoint"),
        (("model", "layers.0.weight"), "evil", "is no tensor in the checkpoint"),
    ],
)  # fmt: skip
def test_an_engine_takes_over_no_made_up_numbers(
    keys: tuple[Any, ...], value: Any, said: str, tmp_path: Path
) -> None:
    """And no checkpoint in which a tensor is none: torch would leave the old values."""
    model = seeded(Flat)
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        train(model, engine.optimizer, 1)
        forged: Any = EngineState(engine).state_dict()
        inner = forged
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        dcp.save({"app": forged}, checkpoint_id=tmp_path / "forged")
        dcp.save({"app": EngineState(engine)}, checkpoint_id=tmp_path / "good")
        with pytest.raises((CheckpointError, dcp.CheckpointException), match=said):
            dcp.load({"app": EngineState(engine)}, checkpoint_id=tmp_path / "forged")
        dcp.load({"app": EngineState(engine)}, checkpoint_id=tmp_path / "good")
        train(model, engine.optimizer, 1)
