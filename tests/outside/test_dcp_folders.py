"""Checkpoints as folders of torch.distributed.checkpoint and back; folders of others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from typer.testing import CliRunner

import offload
from offload.checkpoint.format.manifest import Manifest
from offload.cli.app import app
from offload.errors import CheckpointError, ConfigError, PathError
from offload.integrations.dcp_export import export_dcp
from offload.integrations.dcp_import import import_dcp
from offload.integrations.dcp_reader import SafeReader
from offload.integrations.distributed_checkpoint import EngineState
from tests.offload.engine_cases import HOST, assert_same_bits, seeded
from tests.outside.test_distributed_checkpoint import (
    CASES,
    AppState,
    Flat,
    Net,
    model_for,
    settings,
    train,
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group: DCP says that it assumes one process
        yield


def contents(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a checkpoint says, apart from how it is cut into files, and its tensors."""
    manifest = Manifest.from_json((path / "manifest.json").read_bytes(), str(path))
    said = manifest.model_dump(exclude={"files", "groups", "generation", "saved_as", "parameters"})
    said["parameters"] = [{**record.model_dump(), "group": None} for record in manifest.parameters]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.rglob("*.safetensors")):
        tensors |= load_file(file)
    for name in [name for name in tensors if name.endswith(".scale")]:
        if not tensors[name.removesuffix(".scale")].any():
            del tensors[name]  # of zeros, which are zeros at any scale
    return said, tensors


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_comes_back_from_dcp_to_the_bit(case: str, tmp_path: Path) -> None:
    keys = CASES[case]
    model = model_for(keys)
    with offload.initialize(model, settings(tmp_path, keys)) as engine:
        train(model, engine.optimizer, 3)
        engine.optimizer.param_groups[0].update(lr=0.02, note="warm")
        engine.save_checkpoint(tmp_path / "saved")
        rest = train(model, engine.optimizer, 2, seed=1)
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "again")
    said, tensors = contents(tmp_path / "again")
    before, values = contents(tmp_path / "saved")
    assert said == before
    assert_same_bits(tensors, values)
    again = model_for(keys)
    with offload.initialize(again, settings(tmp_path, keys, HOST)) as engine:
        engine.load_checkpoint(tmp_path / "again")
        assert train(again, engine.optimizer, 2, seed=1) == rest


@pytest.mark.parametrize("case", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("safe", [True, False])
def test_an_engine_takes_over_what_was_exported(case: str, safe: bool, tmp_path: Path) -> None:
    keys, where = CASES[case], tmp_path / "dcp"
    model = model_for(keys)
    with offload.initialize(model, settings(tmp_path, keys)) as engine:
        train(model, engine.optimizer, 3)
        engine.save_checkpoint(tmp_path / "saved")
        rest = train(model, engine.optimizer, 2, seed=1)
    export_dcp(tmp_path / "saved", where)
    again = model_for(keys)
    with offload.initialize(again, settings(tmp_path, keys, HOST)) as engine:
        given: dict[str, Any] = (
            {"storage_reader": SafeReader(where)} if safe else {"checkpoint_id": where}
        )
        dcp.load({"app": EngineState(engine)}, **given)
        assert train(again, engine.optimizer, 2, seed=1) == rest


def test_torch_takes_over_what_was_exported(tmp_path: Path) -> None:
    model = seeded(Flat)
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        train(model, engine.optimizer, 3)
        engine.save_checkpoint(tmp_path / "saved")
        weights = model.state_dict()
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    other = Flat()
    optimizer = torch.optim.AdamW(other.parameters())
    part = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"app": AppState(other, optimizer)}, checkpoint_id=tmp_path / "dcp", planner=part)
    assert_same_bits(other.state_dict(), weights)
    assert optimizer.state[other.layers[0].weight]["step"] == 3


# ---------------------------------------------------------------------------- folders of others
def plain(tmp_path: Path, kind: Any = Flat, **how: bool) -> tuple[nn.Module, Path, list[float]]:
    """A model trained by torch, what it saved, and how it goes on."""
    model = seeded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(**how))
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "torch")
    values = {name: value.clone() for name, value in model.state_dict().items()}
    rest = train(model, optimizer, 3, seed=1)
    model.load_state_dict(values)
    return model, tmp_path / "torch", rest


@pytest.mark.parametrize("form", [{}, {"flatten_optimizer_state_dict": True}])
def test_training_goes_on_from_what_torch_saved(form: dict[str, bool], tmp_path: Path) -> None:
    saved, where, rest = plain(tmp_path, **form)
    import_dcp(where, tmp_path / "ours", kind="adamw")
    model = seeded(Flat)
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        engine.load_checkpoint(tmp_path / "ours")
        assert_same_bits(model.state_dict(), saved.state_dict())
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2
        found = train(model, engine.optimizer, 3, seed=1)
    torch.testing.assert_close(found, rest, rtol=0, atol=1e-6)


def test_what_an_engine_state_saved_is_imported(tmp_path: Path) -> None:
    keys = CASES["bf16"]
    model = model_for(keys, Flat)
    with offload.initialize(model, settings(tmp_path, keys)) as engine:
        train(model, engine.optimizer, 3)
        dcp.save({"app": EngineState(engine)}, checkpoint_id=tmp_path / "dcp")
        rest = train(model, engine.optimizer, 2, seed=1)
    import_dcp(tmp_path / "dcp", tmp_path / "ours", kind="adamw")
    again = model_for(keys, Flat)
    with offload.initialize(again, settings(tmp_path, keys, HOST)) as engine:
        engine.load_checkpoint(tmp_path / "ours")
        assert train(again, engine.optimizer, 2, seed=1) == rest


@pytest.mark.parametrize("nested", [True, False])
def test_weights_alone_become_a_safetensors_file(nested: bool, tmp_path: Path) -> None:
    weights = seeded(Net).state_dict()
    dcp.save({"model": weights} if nested else weights, checkpoint_id=tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "out.safetensors")
    assert_same_bits(load_file(tmp_path / "out.safetensors"), dict(weights))
    with pytest.raises(CheckpointError, match=r"no states of an optimizer; OUT\.safetensors"):
        import_dcp(tmp_path / "dcp", tmp_path / "ours")
    with pytest.raises(PathError, match="exists"):
        import_dcp(tmp_path / "dcp", tmp_path / "out.safetensors")


def test_what_is_not_clear_is_refused_and_not_guessed(tmp_path: Path) -> None:
    _, where, _ = plain(tmp_path, Net)
    with pytest.raises(ConfigError, match="--optimizer TYPE"):
        import_dcp(where, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="have no states: frozen, buffers, or tied"):
        import_dcp(where, tmp_path / "ours", kind="adamw")
    assert not (tmp_path / "ours").exists()
    shutil.rmtree(where)
    _, where, _ = plain(tmp_path)
    with pytest.raises(CheckpointError, match="not those of sgd"):
        import_dcp(where, tmp_path / "ours", kind="sgd")
    shutil.rmtree(where)
    dcp.save({"a": {"model": {"x": torch.ones(1)}}, "b": {"model": {"x": torch.ones(1)}}},
             checkpoint_id=where)  # fmt: skip
    with pytest.raises(CheckpointError, match="2 models"):
        import_dcp(where, tmp_path / "out.safetensors")


def test_the_commands(tmp_path: Path) -> None:
    _, where, _ = plain(tmp_path)
    ours, back = tmp_path / "ours", tmp_path / "back"
    for command in (
        ["import-dcp", str(where), str(ours), "--optimizer", "adamw"],
        ["verify", str(ours)],
        ["export-dcp", str(ours), str(back)],
        ["import-dcp", str(back), str(tmp_path / "out.safetensors")],
    ):
        result = CliRunner().invoke(app, ["checkpoint", *command])
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["checkpoint", "import-dcp", str(where), str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "--optimizer" in result.output


def test_sharded_tensors_are_put_together(tmp_path: Path) -> None:
    """As several ranks write them: a file and parts each."""
    import io
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

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
    found = {"w": torch.zeros(5, 6)}
    dcp.load(found, storage_reader=SafeReader(tmp_path))
    assert_same_bits(found, {"w": value})


def test_values_that_are_no_tensors_are_read_as_data(tmp_path: Path) -> None:
    values = {"epoch": 3, "name": "run", "numbers": [1.5, (True, None)], "nested": {"a": b"raw"}}
    dcp.save({**values, "x": torch.ones(2)}, checkpoint_id=tmp_path)
    found: dict[str, Any] = {
        "epoch": 0, "name": "", "numbers": [0.0, ()], "nested": {"a": b""}, "x": torch.zeros(2)
    }  # fmt: skip
    dcp.load(found, storage_reader=SafeReader(tmp_path))
    assert torch.equal(found.pop("x"), torch.ones(2))
    assert found == values
    assert json.dumps(found["numbers"]) == "[1.5, [true, null]]"


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
        for given in (
            {"storage_reader": SafeReader(tmp_path / "forged")},
            {"checkpoint_id": tmp_path / "forged"},
        ):
            with pytest.raises((CheckpointError, dcp.CheckpointException), match=said):
                dcp.load({"app": EngineState(engine)}, **given)
        dcp.load({"app": EngineState(engine)}, storage_reader=SafeReader(tmp_path / "good"))
        train(model, engine.optimizer, 1)


PROGRAM = """
import sys
from pathlib import Path
import torch
from offload import __version__
from offload.checkpoint.format.composing import Composer, fields_of, group_of, numbers_of
from offload.checkpoint.format.manifest import (
    BUFFERS, Manifest, OptimizerRecord, ParameterRecord, ParamGroupRecord)
from offload.integrations.dcp_export import export_dcp
from offload.integrations.dcp_import import import_dcp
from offload.process.machine import peak_rss_nbytes
from offload.zero.step.records import RecordFormat
from offload.kernels.variants import Master

folder, count, width = Path(sys.argv[1]), 40, 1024
kept = RecordFormat(Master.SPLIT)
records = [
    ParameterRecord(names=[f"layers.{n}.weight"], dtype="BF16", shape=[width, width],
                    trainable=True, steps=3, group=n) for n in range(count)]
group = ParamGroupRecord(numbers=numbers_of("adamw", {}), params=[r.names[0] for r in records])
manifest = Manifest(
    offload=__version__, precision="bf16", steps_taken=3, steps_skipped=0, loss_scale=None,
    optimizer=OptimizerRecord(
        type="adamw", master="split", fields=fields_of(kept), param_groups=[group]),
    groups=[group_of(r) for r in records], parameters=records, buffers=[], buffers_file=BUFFERS,
    files={})
(folder / "saved").mkdir()
made = Composer(folder / "saved", manifest, kept)
for n, record in enumerate(records):
    master = torch.full((width, width), n + 0.1)
    states = {"exp_avg": master / 2, "exp_avg_sq": master / 3}
    made.add_trained(record, master.bfloat16(), states, master)
made.add_buffers([])
made.finish("saved")
before = peak_rss_nbytes()
export_dcp(folder / "saved", folder / "dcp")
middle = peak_rss_nbytes()
import_dcp(folder / "dcp", folder / "again")
print(before >> 20, middle >> 20, peak_rss_nbytes() >> 20)
"""


def test_both_ways_hold_one_parameter_at_a_time(tmp_path: Path) -> None:
    """Of 40 with 14 MB each: 560 MB."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    before, exported, imported = map(int, ended.stdout.split())
    assert exported - before < 150  # of torch.distributed's modules, too
    assert imported - exported < 120  # a fifth, whatever the heap keeps
