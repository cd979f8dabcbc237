"""OffloadTrainer logs, saves and resumes what transformers' Trainer does, and the engine is made by
itself."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.cli import main
from offload.errors import CheckpointError, ConfigError, OffloadError, UnsupportedError
from tests.deepspeed.known_files import KNOWN
from tests.offload.engine_cases import assert_same_bits, assert_scheduler_is_saved, config, seeded
from tests.outside.trainer_cases import (
    ARGUMENTS,
    CLIP,
    PLACEMENTS,
    STEPS,
    Rows,
    assert_close,
    logged,
    quiet,
    tiny_llama,
    transformers,
    values_of,
)

pytest.importorskip("accelerate")
trainers = importlib.import_module("offload.integrations.transformers")

pytestmark = pytest.mark.usefixtures("quiet_trainers")

KEYS: dict[str, Any] = {**ARGUMENTS, "weight_decay": 0.1}
SHORT: dict[str, Any] = {
    **KEYS, "max_steps": 3, "eval_strategy": "no", "save_strategy": "no",
    "gradient_accumulation_steps": 1,
}  # fmt: skip


@pytest.fixture
def open_engines() -> Iterator[list[Any]]:
    """Trainers whose engines are closed at the end."""
    opened: list[Any] = []
    yield opened
    for trainer in opened:
        if trainer._engine is not None:
            trainer._engine.close()


def settings(folder: Path, placement: str = "nvme", **keys: Any) -> dict[str, Any]:
    """Without an optimizer: TrainingArguments have it. Each block is a group of its own."""
    blocks = {"blocks": ["LlamaDecoderLayer"]}
    return config(folder, PLACEMENTS[placement], **{"groups": blocks, **keys})


def make(kind: Any, folder: Path, model: Any = None, **keys: Any) -> Any:
    """A trainer; keys of its own and of TrainingArguments."""
    own = {"model_init", "offload", "optimizers", "callbacks", "train_dataset"}
    given = {key: keys.pop(key) for key in own & keys.keys()}
    args = transformers.TrainingArguments(output_dir=str(folder), **{**KEYS, **keys})
    given = {"train_dataset": Rows(72, seed=1), "eval_dataset": Rows(8, seed=2), **given}
    if "model_init" not in given:
        given["model"] = tiny_llama() if model is None else model
    return kind(args=args, **given)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A plain Trainer's folder, logs and weights."""
    folder = tmp_path_factory.mktemp("plain")
    with quiet():
        trainer = make(transformers.Trainer, folder)
        trainer.train()
    return folder, logged(trainer), values_of(trainer.model)


@pytest.mark.sample("nvme")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_logs_and_weights_are_plain_trainers_and_a_resumed_run_has_the_same_bits(
    placement: str, plain: Any, tmp_path: Path
) -> None:
    given = settings(tmp_path, placement)
    trainer = make(trainers.OffloadTrainer, tmp_path / "whole", offload=given)
    trainer.train()
    whole, weights = logged(trainer), values_of(trainer.model)
    assert_scheduler_is_saved(trainer.engine)
    trainer.engine.close()
    assert len(whole["loss"]) == STEPS
    assert min(whole["grad_norm"]) > CLIP
    assert_close(whole, plain[1])
    assert_close(weights, plain[2])
    saved = {path.name for path in (tmp_path / "whole/checkpoint-8").iterdir()}
    assert "optimizer.pt" not in saved
    assert {"offload", "model.safetensors", "config.json", "trainer_state.json"} <= saved
    again = make(trainers.OffloadTrainer, tmp_path / "again", offload=given)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-8"))
    assert logged(again) == whole
    assert_same_bits(values_of(again.model), weights)
    again.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_model_comes_back_and_old_checkpoints_go(
    only_model: bool, tmp_path: Path, open_engines: list[Any]
) -> None:
    keys = {
        "eval_steps": 4, "save_steps": 4, "save_total_limit": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "greater_is_better": False, "save_only_model": only_model,
        "max_steps": 12, "train_dataset": Rows(120, seed=1),  # the rows are learnt, no others
    }  # fmt: skip
    plain = make(transformers.Trainer, tmp_path / "plain", **keys)
    plain.train()
    trainer = make(trainers.OffloadTrainer, tmp_path / "run", offload=settings(tmp_path), **keys)
    open_engines.append(trainer)
    trainer.train()
    folders = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("plain", "run")]
    assert folders[0] == folders[1]
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == Path(plain.state.best_model_checkpoint).name == "checkpoint-4"
    assert_close(values_of(trainer.model), values_of(plain.model))
    saved = transformers.AutoModelForCausalLM.from_pretrained(best)
    assert_same_bits(values_of(trainer.model), values_of(saved))
    assert_close(trainer.evaluate()["eval_loss"], plain.evaluate()["eval_loss"])


def test_evaluation_prediction_and_saving_before_and_after_training(
    tmp_path: Path, open_engines: list[Any]
) -> None:
    plain = make(transformers.Trainer, tmp_path / "plain", **SHORT)
    trainer = make(trainers.OffloadTrainer, tmp_path / "run", offload=settings(tmp_path), **SHORT)
    open_engines.append(trainer)
    for each in plain, trainer:
        each.evaluate()
        each.train()
        each.evaluate()
        each.save_model(str(tmp_path / type(each).__name__))
        each.train()
    assert_close(logged(trainer), logged(plain))
    predictions = [each.predict(Rows(4, seed=3)).predictions for each in (plain, trainer)]
    assert_close(torch.from_numpy(predictions[1]), torch.from_numpy(predictions[0]))


def test_a_model_on_the_meta_device_begins_with_the_engine(
    tmp_path: Path, open_engines: list[Any]
) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny_llama().config)
    trainer = make(
        trainers.OffloadTrainer, tmp_path / "run", model, offload=settings(tmp_path),
        train_dataset=Rows(8, seed=2), **{**SHORT, "max_steps": 10, "learning_rate": 1e-2},
    )  # fmt: skip
    open_engines.append(trainer)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first - 0.1


def test_a_model_in_an_engine_is_taken_over_and_the_engine_itself_is_refused(
    tmp_path: Path,
) -> None:
    model = tiny_llama()
    with offload.initialize(model, settings(tmp_path, optimizer={"lr": 3e-3})) as engine:
        for given in {"offload": engine}, {"optimizers": (engine.optimizer, None)}:
            with pytest.raises(ConfigError, match="makes an engine itself"):
                make(trainers.OffloadTrainer, tmp_path / "run", model, **{**SHORT, **given})
        with pytest.raises(UnsupportedError, match=r"optimizers=\(engine.optimizer, None\)"):
            make(transformers.Trainer, tmp_path / "run", model, **SHORT).train()
        trainer = make(trainers.OffloadTrainer, tmp_path / "run", model, offload={}, **SHORT)
        trainer.train()
        assert engine.is_closed
        assert trainer.engine is not engine
        trainer.engine.close()


# --------------------------------------------------------------------------- plain Trainer
@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_plain_trainer_trains_with_an_engines_optimizer_and_resumes(
    placement: str, plain: Any, tmp_path: Path
) -> None:
    keys = settings(tmp_path, placement, optimizer={"lr": 3e-3, "weight_decay": 0.1})
    runs = []
    for folder, resume in ("whole", None), ("again", str(tmp_path / "whole/checkpoint-8")):
        model = tiny_llama()
        groups = [  # as Trainer makes them
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        with offload.initialize(model, keys, parameters=groups) as engine:
            trainer = make(
                transformers.Trainer, tmp_path / folder, model, optimizers=(engine.optimizer, None)
            )
            trainer.train(resume_from_checkpoint=resume)
            runs.append((logged(trainer), values_of(model)))
    (whole, weights), again = runs
    assert_close(whole, plain[1])
    assert_close(weights, plain[2])
    assert again[0] == whole
    assert_same_bits(again[1], weights)


# --------------------------------------------------------------------------- one source of numbers
def test_trainers_file_for_deepspeed_trains_by_the_lines_that_migrate_prints(
    tmp_path: Path, capsys: Any, open_engines: list[Any]
) -> None:
    """Equal to a plain Trainer with those arguments."""
    file, out = tmp_path / "ds.json", tmp_path / "offload.yaml"
    file.write_text(json.dumps(KNOWN["transformers, ZeRO-3"]))
    with pytest.raises(SystemExit):
        main(["migrate", str(file), "-o", str(out)])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line[:4] == "    "]
    assert len(lines) == 2
    keys = {**KEYS, **SHORT, "learning_rate": 3e-3, "warmup_steps": 2, "max_grad_norm": 0.3}
    known: dict[str, Any] = {
        "model": tiny_llama(), "rows": Rows(72, seed=1),
        "args": transformers.TrainingArguments(**{**keys, "output_dir": tmp_path}),
    }  # fmt: skip
    exec("\n".join(lines).replace("args,", "args, train_dataset=rows,"), known)
    open_engines.append(known["trainer"])
    known["trainer"].train()
    plain = make(transformers.Trainer, tmp_path / "plain", **keys)
    plain.train()
    assert_close(values_of(known["trainer"].model), values_of(plain.model))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "keys",
    [
        {"optim": "sgd", "learning_rate": 0.1},
        {"optim": "adagrad", "learning_rate": 0.05},
        {"optim": "adamw_torch"},
        {"max_grad_norm": 0.0},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 100},  # more than there are batches
    ],
    ids=str,
)
def test_other_arguments_do_what_they_do_there(
    keys: dict[str, Any], tmp_path: Path, open_engines: list[Any]
) -> None:
    rows = Rows(12, seed=1)
    plain = make(transformers.Trainer, tmp_path / "plain", train_dataset=rows, **{**SHORT, **keys})
    plain.train()
    trainer = make(
        trainers.OffloadTrainer, tmp_path / "run", offload=settings(tmp_path), train_dataset=rows,
        **{**SHORT, **keys},
    )  # fmt: skip
    open_engines.append(trainer)
    trainer.train()
    assert_close(logged(trainer), logged(plain))
    assert_close(values_of(trainer.model), values_of(plain.model))


REFUSED: dict[str, dict[str, Any]] = {
    "adafactor": {"optim": "adafactor"},
    "states: int8": {"optim": "adamw_8bit"},
    "under optimizer:": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "is not one of the model": {"optimizers": (torch.optim.AdamW([torch.ones(2)]), None)},
    "clip_grad_norm": {"offload": {"optimizer": {"in_backward": True}}},
    "precison": {"offload": {"precison": "bf16"}},
    "fp16=True": {"offload": {"precision": "fp32"}, "fp16": True},
}
CONFLICTS: dict[str, dict[str, Any]] = {  # both values are named
    "optimizer.lr: 0.5": {"offload": {"optimizer": {"lr": 0.5}}},
    "optimizer.weight_decay: 0.5": {"offload": {"optimizer": {"weight_decay": 0.5}}},
    "optimizer.betas: [0.5, 0.6]": {
        "offload": {"optimizer": {"betas": [0.5, 0.6], "lr": 3e-3}}, "adam_beta1": 0.8,
    },
    "optimizer.type: lion": {"offload": {"optimizer": {"type": "lion"}}, "optim": "sgd"},
    "clip_grad_norm: 3": {"offload": {"clip_grad_norm": 3}},
    "gradient_accumulation_steps: 3": {"offload": {"gradient_accumulation_steps": 3}},
    "seed: 3": {"offload": {"seed": 3}},
    "precision: fp16": {"offload": {"precision": "fp16"}, "bf16": True},
    "device: cuda": {"offload": {"device": "cuda"}},
}  # fmt: skip


@pytest.mark.parametrize("what", [*REFUSED, *CONFLICTS])
def test_what_cannot_be_combined_is_refused_before_training(what: str, tmp_path: Path) -> None:
    with pytest.raises(OffloadError) as caught:
        make(trainers.OffloadTrainer, tmp_path / "run", **(REFUSED | CONFLICTS)[what]).train()
    needed = {what} if what in REFUSED else {what, "TrainingArguments"}
    assert [each for each in needed if each not in str(caught.value)] == []


# --------------------------------------------------------------------------- weights in files
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, open_engines: list[Any]) -> None:
    wide = seeded(lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**tiny_llama().config.to_dict(), "intermediate_size": 64})
    ))  # fmt: skip
    deep = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**tiny_llama().config.to_dict(), "num_hidden_layers": 2})
    )
    trainer = make(trainers.OffloadTrainer, tmp_path / "run", offload=settings(tmp_path), **SHORT)
    open_engines.append(trainer)
    before = values_of(trainer.engine.module)
    for model, what in (wide, "has shape"), (deep, "has no model.layers.2"):
        model.save_pretrained(tmp_path / "other")
        with pytest.raises(CheckpointError, match=what):
            trainer._load_from_checkpoint(str(tmp_path / "other"))
    assert_same_bits(values_of(trainer.model), before)


# --------------------------------------------------------------------------- several ranks
@pytest.mark.slow  # three processes, each with its imports
def test_two_ranks_train_save_and_resume_as_with_ddp(tmp_path: Path) -> None:
    program = ["-m", "tests.outside.trainer_ranks_program", str(tmp_path)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, *program], capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, actual = (json.loads((tmp_path / f"{k}.json").read_text()) for k in ("plain", "offload"))
    assert len(actual["whole"]["loss"]) == 6
    assert_close(actual["whole"], plain["whole"])
    assert actual["resumed"] == actual["whole"]
    models = [
        values_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-model"))
        for name in ("plain", "offload", "again")
    ]
    assert_close(models[1], models[0])
    assert_same_bits(models[2], models[1])
