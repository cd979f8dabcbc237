"""What touches files and names knows packed parameters whole: an engine whose experts are groups of
their own writes, to the bit, what one writes whose experts are with their block, and reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import offload
from offload.checkpoint.foreign.exporting import export
from offload.errors import UnsupportedError
from offload.weights.tensor_file import TensorFile
from offload.zero.groups import module_tree
from tests.offload.engine_cases import HOST, NVME, bits, config
from tests.outside.test_expert_zoo import ARCHITECTURES, build
from tests.ranks.processes import run_ranks

pytestmark = pytest.mark.usefixtures("quiet_transformers")

transformers = pytest.importorskip("transformers")

TABLE = "model.layers.0.mlp.experts.gate_up_proj"
BUDGET = {"host": "64MiB", "nvme": "64MiB"}
Engine = Any


def tiny(seed: int = 0, inner: int = 16) -> Any:
    torch.manual_seed(seed)
    shape = transformers.Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, moe_intermediate_size=inner,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(shape)


def on_meta() -> Any:
    with torch.device("meta"):
        return tiny()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines, with experts split or whole."""
    engines: list[Engine] = []

    def make(
        model: Any, *, split: bool, homes: dict[str, Any] = HOST, precision: str = "fp32",
        weights: Path | None = None, **optimizer: Any,
    ) -> Engine:  # fmt: skip
        monkeypatch.setattr(module_tree, "SMALL_TABLE_NUMEL", 0 if split else 1 << 40)
        adamw = {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1, **optimizer}
        keys = config(tmp_path, homes, precision=precision, optimizer=adamw, budget=BUDGET)
        engine = offload.initialize(model, keys, weights=weights)
        engines.append(engine)
        assert bool(engine.runtime.store.packed) is split
        return engine

    yield make
    for engine in engines:
        engine.close()


def train(engine: Engine, steps: int = 2, seed: int = 1) -> None:
    """Each time a few tokens: most experts have none."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(48, (1, 2), generator=generator)
        engine.backward(engine.module(tokens, labels=tokens).loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def assert_same(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[name])
        else:
            assert bits(value) == bits(other[name]), name


def assert_equal(one: Engine, other: Engine) -> None:
    assert_same(one.module.state_dict(), other.module.state_dict())
    assert_same(*(each.optimizer.state_dict()["state"] for each in (one, other)))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }  # fmt: skip


# ------------------------------------------------------------------------------ checkpoints
@pytest.mark.sample(2)
@pytest.mark.parametrize(("homes", "precision"), [(HOST, "fp32"), (NVME, "bf16")])
def test_checkpoints_do_not_tell_and_are_loaded_either_way(
    made: Any, tmp_path: Path, homes: dict[str, Any], precision: str
) -> None:
    keys = {"homes": homes, "precision": precision}
    split, whole = (made(tiny(), split=each, **keys) for each in (True, False))
    for engine, name in ((split, "split"), (whole, "whole")):
        train(engine)
        engine.save_checkpoint(tmp_path / name)
    assert_same(tensors_in(tmp_path / "split"), tensors_in(tmp_path / "whole"))
    updates = [
        {tuple(each["names"]): each["steps"] for each in read["parameters"]}
        for name in ("split", "whole")
        for read in [json.loads((tmp_path / name / "manifest.json").read_text())]
    ]
    assert updates[0] == updates[1]
    assert len(list((tmp_path / "split" / "parameters").iterdir())) == 4  # not one per expert
    crossed = made(tiny(7), split=True, **keys), made(tiny(7), split=False, **keys)
    crossed[0].load_checkpoint(tmp_path / "whole")
    crossed[1].load_checkpoint(tmp_path / "split")
    for engine in (split, whole, *crossed):
        train(engine, seed=2)
        assert_equal(engine, split)


def as_a_rank(stage: int, saved: str, folder: str) -> dict[str, Tensor]:
    module_tree.SMALL_TABLE_NUMEL = 0
    keys: dict[str, Any] = {**config(Path(folder), HOST), "zero": {"stage": stage}}
    with offload.initialize(tiny(7), keys) as engine:
        engine.load_checkpoint(saved)
        if engine.runtime.store.packed:
            with pytest.raises(UnsupportedError, match="parts of every expert"):
                engine.values.part_of(engine.module.get_parameter(TABLE))
        train(engine, 1)
        engine.save_checkpoint(Path(folder) / f"stage {stage}")
        return dict(engine.module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_load_what_one_saved_and_save_what_one_loads(
    made: Any, tmp_path: Path, stage: int
) -> None:
    split = made(tiny(), split=True)
    train(split)
    split.save_checkpoint(tmp_path / "one")
    here = run_ranks(2, tmp_path / "ranks", as_a_rank, stage, str(tmp_path / "one"), str(tmp_path))
    whole = made(tiny(7), split=False)
    whole.load_checkpoint(tmp_path / f"stage {stage}")
    for found in here:
        assert_same(found, whole.module.state_dict())


# ------------------------------------------------------------------------------ first values


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_that_files_have_one_by_one_are_read_one_by_one(
    made: Any, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "hub")
    assert TABLE not in load_file(tmp_path / "hub" / "model.safetensors")
    lazy = offload.open_pretrained(tmp_path / "hub")
    read: list[int] = []
    own = TensorFile.read_into

    def read_into(file: TensorFile, buffer: memoryview, offset_bytes: int) -> None:
        read.append(buffer.nbytes)
        own(file, buffer, offset_bytes)

    monkeypatch.setattr(TensorFile, "read_into", read_into)
    split = made(lazy, split=True, precision=precision)
    assert sum(read) == sum(p.numel() * 4 for p in model.parameters())  # each byte once
    whole = made(model, split=False, precision=precision)
    assert_same(split.module.state_dict(), whole.module.state_dict())


@pytest.mark.sample(2)
@pytest.mark.parametrize("build", [tiny, on_meta])
def test_weights_are_read_row_by_row(
    made: Any, tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(5)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    read: list[int] = []
    own = TensorFile.read_into

    def read_into(file: TensorFile, buffer: memoryview, offset_bytes: int) -> None:
        read.append(buffer.nbytes)
        own(file, buffer, offset_bytes)

    monkeypatch.setattr(TensorFile, "read_into", read_into)
    engine = made(build(), split=True, weights=tmp_path / "weights.safetensors")
    assert_same(engine.module.state_dict(), model.state_dict())
    table = model.state_dict()[TABLE]
    assert table.nbytes not in read
    assert read.count(table.nbytes // len(table)) >= len(table)


# ------------------------------------------------------------------------------ other formats
def test_exports_and_saved_models_are_in_the_hubs_format(made: Any, tmp_path: Path) -> None:
    from offload.integrations.transformers.hub_export import write_hub_format
    from offload.integrations.transformers.pretrained_load import load_weights
    from offload.integrations.transformers.pretrained_save import StreamedSave

    split = made(tiny(), split=True, precision="bf16")
    own = split.module.save_pretrained
    StreamedSave.install(split.module, split)
    train(split)  # each reader below finds experts that have missed steps
    split.module.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    whole = made(tiny(), split=False, precision="bf16")
    train(whole)
    values = whole.module.state_dict()
    split.save_checkpoint(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "exported", None, None, write_hub_format)
    own(tmp_path / "plain")
    hub = tensors_in(tmp_path / "plain")
    assert TABLE not in hub
    for name in ("exported", "saved"):
        assert_same(tensors_in(tmp_path / name), hub)
        opened = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert_same(opened.state_dict(), values)
    split.module.save_pretrained(tmp_path / "packed", save_original_format=False)
    assert_same(tensors_in(tmp_path / "packed"), values)
    for folder in ("saved", "packed"):
        other = made(tiny(7), split=True, precision="bf16")
        load_weights(other, tmp_path / folder)
        assert_same(other.module.state_dict(), values)


# what a folder of openai_privacy_filter is opened as computes its experts in another way
@pytest.mark.sample("gpt_oss")
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - {"openai_privacy_filter"}))
def test_every_architecture(made: Any, tmp_path: Path, architecture: str) -> None:
    from offload.integrations.transformers.pretrained_save import StreamedSave

    base = build(architecture)
    base.save_pretrained(tmp_path / "hub")
    lazy = offload.open_pretrained(tmp_path / "hub", model_class=type(base))
    opened = type(base).from_pretrained(tmp_path / "hub", dtype="auto")  # type: ignore[attr-defined]
    split, whole = made(lazy, split=True), made(opened, split=False)
    assert_equal(split, whole)
    for engine, name in ((split, "split"), (whole, "whole")):
        found = engine.module(input_ids=torch.tensor([[3, 4, 5]]))
        values = found.logits if hasattr(found, "logits") else found.last_hidden_state
        engine.backward(values.float().square().mean())
        engine.optimizer.step()
        StreamedSave.install(engine.module, engine)
        engine.module.save_pretrained(tmp_path / name / "hub")
        engine.save_checkpoint(tmp_path / name / "checkpoint")
    assert_same(tensors_in(tmp_path / "split"), tensors_in(tmp_path / "whole"))


def test_state_dicts_are_those_of_torch(made: Any) -> None:
    split, whole = made(tiny(), split=True), made(tiny(), split=False)
    for engine in (split, whole):
        train(engine)
    plain = tiny(7)
    plain.load_state_dict(split.module.state_dict())
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    adamw.load_state_dict(split.optimizer.state_dict())
    other = made(tiny(8), split=True)
    other.module.load_state_dict(plain.state_dict())
    other.optimizer.load_state_dict(adamw.state_dict())
    for engine in (other, whole):
        train(engine, seed=2)
    assert_equal(other, whole)
    short = other.optimizer.state_dict()
    state = next(each for each in short["state"].values() if each["exp_avg"].dim() == 3)
    state["exp_avg"] = state["exp_avg"][1:]
    with pytest.raises(ValueError, match=rf"exp_avg of {TABLE} has shape \(7, 32, 32\)"):
        other.optimizer.load_state_dict(short)


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_distributed_checkpoints(made: Any, tmp_path: Path, precision: str) -> None:
    from offload.integrations.distributed_checkpoint import EngineState

    split, whole = (made(tiny(), split=each, precision=precision) for each in (True, False))
    for engine, name in ((split, "split"), (whole, "whole")):
        train(engine)
        dcp.save({"app": EngineState(engine)}, checkpoint_id=tmp_path / name)
    for engine, name in ((split, "whole"), (whole, "split")):
        train(engine, seed=2)
        dcp.load({"app": EngineState(engine)}, checkpoint_id=tmp_path / name)
    for engine in (split, whole):
        train(engine, seed=3)
    assert_equal(split, whole)


# ------------------------------------------------------------------------------ PEFT
@pytest.mark.parametrize(
    ("keys", "splits"),
    [
        ({"target_modules": ["q_proj"]}, True),
        # computed with as wholes, and so kept with their block
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["experts"]}, True),
    ],
)
def test_adapters_train_and_are_saved(
    made: Any, tmp_path: Path, keys: dict[str, Any], splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    engines = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(module_tree, "SMALL_TABLE_NUMEL", least)
        base = tiny()
        torch.manual_seed(5)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **keys))
        engines.append(offload.initialize(model, config(tmp_path, HOST)))
    assert [bool(each.runtime.store.packed) for each in engines] == [splits, False]
    for number, engine in enumerate(engines):
        train(engine)
        engine.module.save_pretrained(tmp_path / str(number))
    assert_equal(*engines)
    assert_same(tensors_in(tmp_path / "0"), tensors_in(tmp_path / "1"))
    for engine in engines:
        engine.close()
