"""A DeepSpeed configuration as one of offload: what each key becomes, and what is refused."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.deepspeed.keys import ALSO, FILLED, HARMLESS, IGNORED, MAPPED, UNSUPPORTED
from offload.deepspeed.migration import migrate, read_ds_config
from offload.tiers.errors import ConfigError
from tests.deepspeed.key_page import PAGE, with_table
from tests.deepspeed.known_files import KNOWN
from tests.offload.test_cli import run

BATCH = {"train_micro_batch_size_per_gpu": 2}
ZERO3 = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/a"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
        "sub_group_size": 1e6,
        "overlap_comm": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 4,
    **BATCH,
}


def config_of(ds: dict[str, Any], ranks: int | None = None) -> OffloadConfig:
    return migrate(ds, ranks).config


def test_a_zero_3_file_with_nvme(tmp_path: Path) -> None:
    made = migrate(ZERO3)
    path = tmp_path / "offload.yaml"
    path.write_text(made.to_yaml("ds_config.json"))
    config = OffloadConfig.load(path)
    assert config == made.config
    assert (config.precision, config.skips_nonfinite, config.zero.stage) == ("bf16", True, 3)
    assert config.placement.parameters is not None
    assert config.placement.parameters.describe() == "nvme"
    assert config.nvme.paths == ("/a", "/b")
    assert config.optimizer.chunk == 1_000_448
    assert config.optimizer.numbers["betas"] == (0.9, 0.95)
    assert config.optimizer.weight_decay == 0  # DeepSpeed's default, not torch's
    assert (config.clip_grad_norm, config.gradient_accumulation_steps) == (0.5, 4)


def paths(tables: Mapping[str, Iterable[str]]) -> list[str]:
    return [f"{section}.{name}".lstrip(".") for section, names in tables.items() for name in names]


VALUES: dict[str, Any] = {
    "optimizer.type": "AdamW", "scheduler.type": "WarmupLR", "communication_data_type": "fp32",
    "optimizer.params.betas": [0.9, 0.99], "offload": {"seed": 3}, "train_batch_size": 2,
    "zero_optimization.offload_param.device": "cpu", "optimizer.params.momentum": None,
    "zero_optimization.offload_optimizer.device": "cpu", "optimizer.params.dampening": None,
    "optimizer.params.nesterov": None, "optimizer.params.lr_decay": None,
    "zero_optimization.offload_param.nvme_path": "/a",
    "zero_optimization.offload_optimizer.nvme_path": "/a",
}  # fmt: skip


def file_with(path: str, value: Any) -> dict[str, Any]:
    section, _, name = path.rpartition(".")
    made: dict[str, Any] = {**BATCH}
    if section.startswith("optimizer"):
        made["optimizer"] = {"type": "AdamW"}
    if section == "scheduler":
        made["scheduler"] = {"type": "WarmupLR"}
    if section in ("fp16", "bf16"):
        made[section] = {"enabled": True}
    inner = made
    for part in filter(None, section.split(".")):
        inner = inner.setdefault(part, {})
    inner[name] = value
    return made


@pytest.mark.sample(5)
@pytest.mark.parametrize("path", [*paths(MAPPED), *ALSO])
def test_every_key_that_is_followed_has_a_comment_in_a_yaml_that_loads(
    path: str, tmp_path: Path
) -> None:
    value = VALUES.get(path, 1)
    made = migrate(file_with(path, value))
    text = made.to_yaml("x.json")
    file = tmp_path / "offload.yaml"
    file.write_text(text)
    assert OffloadConfig.load(file) == made.config
    becomes = MAPPED[path.rpartition(".")[0]].get(path.rpartition(".")[2])
    if becomes is not None and becomes.becomes and value is not None:
        assert f"# {path}: " in text
    assert made.ignored == []


@pytest.mark.parametrize("path", paths(IGNORED)[::4])
def test_a_key_that_is_ignored_is_named_once(path: str) -> None:
    made = migrate(file_with(path, 1))
    assert made.warnings == [f"ignored: {path}"]
    assert migrate(file_with(path, False)).warnings == []


@pytest.mark.parametrize("path", paths(UNSUPPORTED)[::2])
def test_a_key_that_is_not_supported_is_an_error_unless_it_is_off(path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path}: 3 is not supported")):
        migrate(file_with(path, 3))
    assert migrate(file_with(path, HARMLESS.get(path, False))).warnings == []


def test_auto_is_left_to_the_trainer_where_it_fills_it_in() -> None:
    for path in paths(MAPPED):
        if path in ("optimizer.type", "scheduler.type"):
            continue
        made = migrate(file_with(path, "auto"))
        assert made.unfilled == ([path] if path in FILLED else []), path
        assert made.warnings == []
        OffloadConfig.load(made.values)


@pytest.mark.parametrize(
    ("ds", "words"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean `zero_opt"),
        ({"zero_optimization": {"stagee": 3}}, "zero_optimization.stagee: unknown key; did you"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "did you mean `device`"),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled: expected a valid boolean"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true"),
        ({"optimizer": {"type": "Lamb"}}, "Lamb has no rule here"),
        ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, "momentum"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "max_grad_norm: 1 is"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": {"stage": 4}}, "zero.stage"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path"),
        ({"gradient_clipping": -1}, "below 0"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: "),
        ({"scheduler": {"type": "WarmupLr"}}, "did you mean `WarmupLR`"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "warmup_num_steps"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps: missing"),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size: 7 is not"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16_master"),
        ({"optimizer": [1]}, "expected keys and values"),
        ({"fp16": "auto"}, "fp16: expected keys and values, found 'auto'"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload: true is not supported"),
        ({"zero_optimization": {"sub_group_size": 1, "stage3_sub_group_size": 2}}, "given twice"),
    ],
)
def test_what_is_refused_is_named(ds: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate({**(BATCH if "train_batch_size" not in ds else {"train_micro_batch_size_per_gpu": 2}
                    ), **ds})  # fmt: skip
    assert words in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        migrate({"amp": {"enabled": True}, "zerro": 1, "optimizer": {"type": "Lamb"}})
    assert len(str(caught.value).splitlines()) == 3


def test_switched_off_sections_say_nothing() -> None:
    ds = {
        **BATCH, "fp16": {"enabled": False, "hysteresis": 2}, "bf16": {"enabled": False},
        "amp": {"enabled": False}, "flops_profiler": {"enabled": False}, "tensorboard": {},
    }  # fmt: skip
    assert migrate(ds).warnings == []
    assert config_of(ds).precision == "fp32"


def test_adam_is_adamw_unless_it_says_otherwise() -> None:
    def kind(name: str, **params: Any) -> tuple[str, float]:
        config = config_of({**BATCH, "optimizer": {"type": name, "params": params}})
        return config.optimizer.type, config.optimizer.weight_decay

    assert kind("Adam") == ("adamw", 0.0)
    assert kind("adam", adam_w_mode=False) == ("adam", 0.0)
    assert kind("AdamW", adam_w_mode=False) == ("adamw", 0.0)
    assert kind("AdamW", torch_adam=True) == ("adamw", 0.01)
    assert kind("Lion", weight_decay=0.2) == ("lion", 0.2)
    assert kind("SGD", momentum=0.9, nesterov=True) == ("sgd", 0.0)


def test_loss_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 1}
    made = migrate({**BATCH, "fp16": fp16})
    scaling = made.config.scaling
    assert scaling is not None
    assert (scaling.initial, scaling.growth_interval, scaling.min) == (256.0, 50, 1.0)
    fixed = config_of({**BATCH, "fp16": {"enabled": True, "loss_scale": 128}}).scaling
    assert fixed is not None
    assert (fixed.initial, fixed.min) == (128.0, 128.0)


def test_numbers_of_the_loss_scale_are_not_left_out_in_silence() -> None:
    made = migrate(
        {**BATCH, "fp16": {"enabled": "auto", "initial_scale_power": 20, "loss_scale": 0}}
    )
    assert made.warnings == ["ignored: fp16.initial_scale_power"]


def test_the_share_that_is_offloaded() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    placement = config_of({**BATCH, "zero_optimization": zero}).placement.optimizer
    assert placement is not None
    assert {str(tier): share for tier, share in placement.shares} == {"device": 0.7, "host": 0.3}


def test_stages_and_shard_groups() -> None:
    zero = {"stage": 2, "mics_shard_size": 4}
    assert config_of({**BATCH, "zero_optimization": zero}).zero.shard_group == 4
    assert config_of({**BATCH, "zero_optimization": True}).zero.stage == 1


def test_batches_follow_from_each_other() -> None:
    ds = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
    assert config_of(ds, ranks=4).gradient_accumulation_steps == 4
    assert config_of({**ds, "gradient_accumulation_steps": 8}).gradient_accumulation_steps == 8
    assert "--ranks" in "\n".join(migrate(ds).warnings)
    with pytest.raises(ConfigError, match="x 3 ranks"):
        config_of(ds, ranks=3)


def test_clipping_follows_deepspeed() -> None:
    assert config_of(BATCH).clip_grad_norm == 1.0
    assert config_of({**BATCH, "gradient_clipping": 0}).clip_grad_norm is None
    assert config_of({**BATCH, "gradient_clipping": "auto"}).clip_grad_norm is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"), ("[1]", "expected keys"), ('{"a": 1, "a": 2}', "given twice"),
        ('{"fp16": {"enabled": true} // no\n}', "comments"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_ds_config(path)


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    file, out = tmp_path / "ds.json", tmp_path / "offload.yaml"
    file.write_text(json.dumps({**ZERO3, "scheduler": {"type": "WarmupLR"}}))
    assert run("migrate", str(file), "-o", str(out)) == 0
    said = capsys.readouterr()
    assert 'Schedule.of("WarmupLR"' in said.out
    assert "warning: scheduler.type" in said.err
    assert OffloadConfig.load(out).zero.stage == 3
    assert run("migrate", str(file), "-o", str(out)) == 2
    assert "--force" in capsys.readouterr().err
    assert run("migrate", str(file)) == 0
    assert OffloadConfig.load(out) == migrate(ZERO3).config
    file.write_text('{"zero_optimisation": {}}')
    assert run("migrate", str(file)) == 2
    assert f"{file}: zero_optimisation: unknown key" in capsys.readouterr().err


# ---------------------------------------------------------------- files for transformers' Trainer
@pytest.mark.parametrize("name", KNOWN)
def test_a_file_of_other_projects_needs_no_guess(name: str, tmp_path: Path, capsys: Any) -> None:
    """Its YAML file loads; what it leaves to Trainer is said once, not key by key."""
    file, out = tmp_path / "ds.json", tmp_path / "offload.yaml"
    file.write_text(json.dumps(KNOWN[name]))
    assert run("migrate", str(file), "-o", str(out)) == 0
    said = capsys.readouterr()
    assert OffloadConfig.load(out) == migrate(KNOWN[name]).config
    is_trainers = "auto" in json.dumps(KNOWN[name])
    assert ("is a file for transformers' Trainer" in said.out) == is_trainers
    assert (f'OffloadTrainer(model, args, offload="{out}")' in said.out) == is_trainers
    assert ("scheduler = " in said.out) == (not is_trainers and "scheduler" in KNOWN[name])


def test_batch_sizes_of_trainers_file_are_arguments() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}
    made = migrate({"gradient_clipping": "auto", **sizes}, 4)
    assert made.batches is None
    assert "gradient_accumulation_steps" not in made.values


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text())
