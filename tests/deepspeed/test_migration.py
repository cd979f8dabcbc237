"""A DeepSpeed configuration as ours: what each key becomes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.config import OffloadConfig
from offload.deepspeed.keys import SECTIONS, Fate, Key
from offload.deepspeed.migration import migrate, read_ds_config
from offload.tiers.errors import ConfigError
from tests.deepspeed.key_page import PAGE, with_table
from tests.deepspeed.known_files import KNOWN

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


def every_key() -> Iterator[tuple[str, Key, str]]:
    for section, keys in SECTIONS.items():
        for key in keys:
            for name in (key.name, *key.also):
                yield section, key, name


VALUES: dict[str, Any] = {
    "optimizer.type": "AdamW", "optimizer.params": {},
    "scheduler.params": {}, "scheduler.type": "WarmupLR", "communication_data_type": "fp32",
    "zero_optimization.offload_param": {"device": "cpu"}, "optimizer.params.betas": [0.9, 0.99],
    "zero_optimization.offload_optimizer": {"device": "cpu"},
    "zero_optimization.offload_param.device": "cpu", "optimizer.params.momentum": None,
    "zero_optimization.offload_optimizer.device": "cpu", "optimizer.params.dampening": None,
    "optimizer.params.nesterov": None, "optimizer.params.lr_decay": None,
    "checkpoint.tag_validation": "WARN", "train_batch_size": 2,
    "zero_optimization.offload_param.nvme_path": "/a",
    "zero_optimization.offload_optimizer.nvme_path": "/a",
}  # fmt: skip


def file_with(section: str, name: str, value: Any) -> dict[str, Any]:
    made: dict[str, Any] = {**BATCH}
    if section.startswith("optimizer"):
        made["optimizer"] = {"type": "AdamW"}
    if section == "scheduler":
        made["scheduler"] = {"type": "WarmupLR"}
    inner = made
    for part in filter(None, section.split(".")):
        inner = inner.setdefault(part, {})
    inner[name] = value
    return made


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("section", "key", "name"), [pytest.param(*each, id=f"{each[0]}.{each[2]}".lstrip("."))
                                 for each in every_key()]
)  # fmt: skip
def test_every_key_has_a_comment_in_a_yaml_that_loads(
    section: str, key: Key, name: str, tmp_path: Path
) -> None:
    path = f"{section}.{name}".lstrip(".")
    value = VALUES.get(path, key.harmless[-1] if key.harmless else 1)
    made = migrate(file_with(section, name, value))
    text = made.to_yaml("x.json")
    file = tmp_path / "offload.yaml"
    file.write_text(text)
    assert OffloadConfig.load(file) == made.config
    if not isinstance(value, dict):
        assert f"# {path}: " in text


@pytest.mark.sample(4)
@pytest.mark.parametrize("auto", [each for each in every_key() if each[1].fate is Fate.MAPPED])
def test_auto_is_said_for_what_the_trainer_fills(auto: tuple[str, Key, str]) -> None:
    section, key, name = auto
    path = f"{section}.{name}".lstrip(".")
    if path in ("optimizer.type", "scheduler.type"):
        pytest.skip("a class has a name")
    made = migrate(file_with(section, name, "auto"))
    assert made.warnings == []
    if key.filled and key.becomes != "prefetch":
        assert any(each.startswith(f"{section}.{key.name}".lstrip(".")) for each in made.unfilled)
        assert "# Filled in from TrainingArguments:" in made.to_yaml("x.json")
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
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": {"stage": 4}}, "zero.stage"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path"),
        ({"gradient_clipping": -1}, "below 0"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallelize_module"),
        ({"scheduler": {"type": "WarmupLr"}}, "did you mean `WarmupLR`"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "warmup_num_steps"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "auto"}}}, "Trainer does"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps: missing"),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size: 7 is not"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16_master"),
        ({"optimizer": [1]}, "expected keys and values"),
        ({"zero_optimization": {"cpu_offload": True}}, "write offload_optimizer: {device: cpu}"),
        (
            {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2}},
            "given twice",
        ),
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
    (warning,) = made.warnings
    assert warning.startswith("fp16.initial_scale_power: left out")


def test_the_share_that_is_offloaded() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    placement = config_of({**BATCH, "zero_optimization": zero}).placement.optimizer
    assert placement is not None
    assert {tier.value: share for tier, share in placement.shares} == {"device": 0.7, "host": 0.3}


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


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


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
    warnings = [line for line in said.err.splitlines() if "auto" in line or "fills" in line]
    assert warnings == []
    is_trainers = "auto" in json.dumps(KNOWN[name])
    text = " ".join(said.out.split())
    assert ("is a file for transformers' Trainer" in text) == is_trainers
    assert (f'OffloadTrainer(model, args, train_dataset=..., offload="{out}")' in said.out) == (
        is_trainers
    )
    assert ("scheduler = " in said.out) == (not is_trainers and "scheduler" in KNOWN[name])


TRAIN, MICRO, STEPS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip


@pytest.mark.parametrize(
    ("train", "micro", "steps", "ranks", "says", "ours"),
    [
        ("auto", "auto", "auto", None, {}, 1),
        ("auto", "auto", 4, None, {STEPS: 4}, 4),
        ("auto", 2, "auto", None, {"per_device_train_batch_size": 2}, 1),
        ("auto", 2, 4, 3, {"per_device_train_batch_size": 2, STEPS: 4}, 4),
        (64, "auto", "auto", None, {}, 1),
        (64, 2, "auto", 4, {"per_device_train_batch_size": 2, STEPS: 8}, 8),
        (64, "auto", 4, 2, {"per_device_train_batch_size": 8, STEPS: 4}, 4),
        (64, 2, 8, None, {"per_device_train_batch_size": 2, STEPS: 8}, 8),
    ],
)
def test_the_batch_of_a_step_is_that_of_a_rank_times_accumulation_times_ranks(
    train: Any, micro: Any, steps: Any, ranks: int | None, says: dict[str, int], ours: int
) -> None:
    made = migrate({"gradient_clipping": "auto", TRAIN: train, MICRO: micro, STEPS: steps}, ranks)
    assert made.trainer_arguments == says
    assert made.config.gradient_accumulation_steps == ours


def test_a_schedule_of_trainers_file_becomes_arguments() -> None:
    params = {"warmup_max_lr": 2e-5, "warmup_num_steps": 100, "total_num_steps": 1000}
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", **params}}
    made = migrate({**BATCH, "scheduler": schedule})
    found = made.trainer_arguments
    assert (found["warmup_steps"], found["max_steps"]) == (100, 1000)
    assert found["lr_scheduler_type"] == "linear"
    assert made.config.optimizer.lr == 2e-5
    assert made.printed_schedule is None


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text())
