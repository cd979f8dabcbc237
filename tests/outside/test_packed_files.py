"""What touches files and names knows packed parameters whole: an engine whose experts are groups of
their own writes, to the bit, what one writes whose experts are with their block, and reads it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import offload
from offload.checkpoint.foreign.exporting import export
from offload.zero.groups import parameter_grouping
from tests.offload.engine_cases import HOST, NVME, bits, config
from tests.outside.test_expert_zoo import ARCHITECTURES, build
from tests.outside.test_packed_params import tiny

pytestmark = pytest.mark.usefixtures("quiet_transformers")

transformers = pytest.importorskip("transformers")

TABLE = "model.layers.0.mlp.experts.gate_up_proj"
BUDGET = {"host": "64MiB", "nvme": "64MiB"}
Engine = Any


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(
        model: Any, *, split: bool, homes: dict[str, Any] = HOST, precision: str = "fp32",
        weights: Path | None = None, **optimizer: Any,
    ) -> Engine:  # fmt: skip
        monkeypatch.setattr(parameter_grouping, "SMALL_TABLE_NUMEL", 0 if split else 1 << 40)
        adamw = {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1, **optimizer}
        keys = config(tmp_path, homes, precision=precision, optimizer=adamw, budget=BUDGET)
        engine = offload.initialize(model, keys, weights=weights)
        engines.append(engine)
        assert bool(engine.store.packed) is split
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
@pytest.mark.slow
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


# ------------------------------------------------------------------------------ other formats
def test_exports_have_the_models_names_and_saved_models_the_hubs(made: Any, tmp_path: Path) -> None:
    from offload.integrations.transformers.pretrained import load_weights
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
    export(tmp_path / "checkpoint", tmp_path / "exported")
    own(tmp_path / "plain")
    hub = tensors_in(tmp_path / "plain")
    assert TABLE not in hub
    exported = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert_same(exported.state_dict(), values)
    assert_same(tensors_in(tmp_path / "saved"), hub)
    opened = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
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
        output = engine.module(input_ids=torch.tensor([[3, 4, 5]]))
        values = output.logits if hasattr(output, "logits") else output.last_hidden_state
        engine.backward(values.float().square().mean())
        engine.optimizer.step()
        StreamedSave.install(engine.module, engine)
        engine.module.save_pretrained(tmp_path / name / "hub")
        engine.save_checkpoint(tmp_path / name / "checkpoint")
    assert_same(tensors_in(tmp_path / "split"), tensors_in(tmp_path / "whole"))
