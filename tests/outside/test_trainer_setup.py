"""What a trainer sets up by itself trains through an engine as without one, or is refused by name:
its optimizer, its param groups, and every method that it overrides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import ConfigError, UnsupportedError
from offload.integrations.transformers import OffloadTrainer
from tests.offload.engine_cases import HOST, config
from tests.outside.test_offload_trainer import SHORT, make, settings, trainers
from tests.outside.trainer_cases import (
    Rows,
    assert_close,
    logged,
    tiny_llama,
    transformers,
    values_of,
)

pytestmark = pytest.mark.usefixtures("quiet_trainers")


# --------------------------------------------------------------------------- set-ups
class LayerWise:
    def create_optimizer(self, model: Any = None) -> Any:
        rates = {"layers.0.": 0.0, "layers.1.": 3e-4, "layers.2.": 1e-3}
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if part in n], "lr": rate}
            for part, rate in rates.items()
        ]
        rest = [p for n, p in self.model.named_parameters() if not any(part in n for part in rates)]
        groups.append({"params": rest, "weight_decay": 0.3})
        self.optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.8, 0.99))
        return self.optimizer


class ChangedGroups:
    def create_optimizer(self, model: Any = None) -> Any:
        super().create_optimizer()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
        return self.optimizer


class OtherClass:
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.SGD, {"lr": args.learning_rate * 10, "momentum": 0.9}


class OwnGroups:
    """As sentence-transformers' learning_rate_mapping."""

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        kind, numbers = super().get_optimizer_cls_and_kwargs(args, model)
        mlp = [p for n, p in self.model.named_parameters() if "mlp" in n]
        rest = [p for n, p in self.model.named_parameters() if "mlp" not in n]
        groups = [{"params": mlp, "lr": 1e-4}, {"params": rest}, {"params": []}]
        return kind, {**numbers, "optimizer_dict": groups}


class FrozenInside:
    def create_optimizer(self, model: Any = None) -> Any:
        made = super().create_optimizer()
        self.model.model.layers[0].requires_grad_(requires_grad=False)  # they are in the groups
        return made


class LeftOut:
    """Parameters that need gradients count in the norm, and are not updated."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.Adam(self.model.model.layers.parameters(), lr=1e-3)
        return self.optimizer


class AddedGroup:
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters() if "norm" in name]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is not None:
            return self.optimizer
        self.model.model.norm.requires_grad_(requires_grad=False)
        super().create_optimizer()
        self.model.model.norm.requires_grad_(requires_grad=True)
        self.optimizer.add_param_group({"params": self.model.model.norm.weight, "lr": 0.02})
        return self.optimizer


class ByTrainersNumbers:
    def create_optimizer(self, model: Any = None) -> Any:
        kind, numbers = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        groups = [{
            "params": [p for p in self.model.parameters() if p.requires_grad],
            "weight_decay": self.args.weight_decay,
        }]  # fmt: skip
        self.optimizer = kind(groups, **numbers)
        return self.optimizer


SETUPS = {
    each.__name__: each
    for each in (
        LayerWise, ChangedGroups, OtherClass, OwnGroups, FrozenInside, LeftOut, AddedGroup,
        ByTrainersNumbers,
    )
}  # fmt: skip
ORDERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "behind": lambda setup: (trainers.OffloadMixin, setup, transformers.Trainer),
    "front": lambda setup: (setup, trainers.OffloadTrainer),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("setup", SETUPS)
def test_an_optimizer_that_a_trainer_sets_up_trains_as_without_an_engine(
    setup: str, order: str, tmp_path: Path
) -> None:
    """Twice: the second training has the optimizer that plain Trainer has there."""
    plain_kind = type("Plain", (SETUPS[setup], transformers.Trainer), {})
    plain = make(plain_kind, tmp_path / "plain", **SHORT)
    kind = type("Mine", ORDERS[order](SETUPS[setup]), {})
    trainer = make(kind, tmp_path / "run", offload=settings(tmp_path), **SHORT)
    before = values_of(plain.model)
    for _ in range(2):
        plain.train()
        trainer.train()
        assert_close(logged(trainer), logged(plain))
    weights = values_of(trainer.model)
    assert_close(weights, values_of(plain.model))
    moved = {name for name in weights if not torch.equal(weights[name], before[name])}
    still = [name for name in weights if "layers.0." in name and name not in moved]
    assert bool(still) == (setup in ("LayerWise", "FrozenInside"))
    trainer.engine.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("brought", ["optimizers", "optimizer_cls_and_kwargs"])
def test_an_optimizer_that_the_program_brings_trains_with_its_scheduler(
    brought: str, tmp_path: Path
) -> None:
    def trainer_of(kind: Any, name: str, **keys: Any) -> Any:
        args = transformers.TrainingArguments(output_dir=str(tmp_path / name), **SHORT)
        model = tiny_llama()
        if brought == "optimizers":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            given: Any = (optimizer, schedule)
        else:
            given = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
        return kind(model, args, train_dataset=Rows(72, seed=1), **{brought: given}, **keys)

    plain = trainer_of(transformers.Trainer, "plain")
    trainer = trainer_of(trainers.OffloadTrainer, "run", offload=settings(tmp_path))
    for each in plain, trainer:
        each.train()
    assert_close(logged(trainer), logged(plain))
    rates = [
        [entry["learning_rate"] for entry in each.state.log_history if "learning_rate" in entry]
        for each in (trainer, plain)
    ]
    assert rates[0] == rates[1]
    assert_close(values_of(trainer.model), values_of(plain.model))
    trainer.engine.close()


# --------------------------------------------------------------------------- every method
HONOURED = {  # the mixin adds to them, and calls the trainer's
    "_build_accelerator_args", "_clip_grad_norm", "_inner_training_loop", "_load_best_model",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_prepare_for_training",
    "call_model_init", "create_optimizer", "evaluation_loop", "get_optimizer_cls_and_kwargs",
    "save_model", "training_step",
}  # fmt: skip
REFUSED = {"_save_optimizer_and_scheduler"}  # in a trainer behind the mixin
UNCALLED = {"_move_model_to_device"}  # the engine moves the model


def test_every_method_of_trainer_that_the_mixin_has_is_in_the_table() -> None:
    """All others are the trainer's, as they are."""
    methods = {name for name, value in vars(trainers.OffloadMixin).items() if callable(value) or
               isinstance(value, staticmethod)}  # fmt: skip
    theirs = set(dir(transformers.Seq2SeqTrainer)) - set(dir(object))
    assert (methods & theirs) - {"__init__", "__module__"} == HONOURED | REFUSED | UNCALLED


def recording(base: Any, called: set[str], *but: str) -> Any:
    """A trainer that overrides all methods of Trainer, and notes which are called."""

    def override(name: str, value: Any) -> Any:
        if isinstance(value, staticmethod):

            def static(*args: Any, **kwargs: Any) -> Any:
                called.add(name)
                return getattr(base, name)(*args, **kwargs)

            return staticmethod(static)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(super(kind, self), name)(*args, **kwargs)

        return method

    kind: Any = type(
        "Recording", (base,),
        {
            name: override(name, value)
            for name, value in vars(transformers.Trainer).items()
            if not name.startswith("__") and name not in but
            and isinstance(value, staticmethod | type(override))
        },
    )  # fmt: skip
    return kind


@pytest.mark.slow
def test_every_method_that_a_trainer_overrides_is_called_as_without_an_engine(
    tmp_path: Path,
) -> None:
    keys = {
        **SHORT, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_steps": 1,
        "eval_strategy": "steps", "load_best_model_at_end": True,
    }  # fmt: skip
    plain, behind, front = (set[str]() for _ in range(3))
    statics = "get_optimizer_cls_and_kwargs"
    kinds = {
        "plain": recording(transformers.Trainer, plain),
        "behind": type("Behind", (trainers.OffloadMixin, recording(transformers.Trainer, behind,
                                                               *REFUSED)), {}),
        "front": recording(trainers.OffloadTrainer, front, statics),  # as above, by the mixin's
    }  # fmt: skip
    for name, kind in kinds.items():
        for resume in None, str(tmp_path / name / "checkpoint-1"):
            own = {} if name == "plain" else {"offload": settings(tmp_path)}
            trainer = make(kind, tmp_path / name, **keys, **own)
            trainer.train(resume_from_checkpoint=resume)
            trainer.predict(Rows(2, seed=3))
            if name != "plain":
                trainer.engine.close()
    assert HONOURED - {"call_model_init"} <= plain
    assert plain - behind == REFUSED | UNCALLED
    warned = "_issue_warnings_after_load"  # of what is an error here
    assert plain - front == {statics, warned}


# --------------------------------------------------------------------------- refused by name
class HeadOutside(trainers.OffloadTrainer):  # type: ignore[misc, name-defined]
    def create_optimizer(self, model: Any = None) -> Any:
        super().create_optimizer()
        self.beside = nn.ModuleDict({"classifier": nn.Linear(4, 2)})
        self.optimizer.add_param_group({"params": self.beside.parameters()})
        return self.optimizer


class ClassWithoutRule(trainers.OffloadTrainer):  # type: ignore[misc, name-defined]
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.RMSprop, {"lr": 1e-3}


class NoOptimizer(trainers.OffloadTrainer):  # type: ignore[misc, name-defined]
    def create_optimizer(self, model: Any = None) -> Any:
        return torch.optim.AdamW(self.model.parameters())


class SavesStates(transformers.Trainer):  # type: ignore[misc]
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)


@pytest.mark.parametrize(
    ("kind", "keys", "what"),
    [
        (HeadOutside, {}, r"\(2, 4\)"),
        (ClassWithoutRule, {}, r"optimizer of ClassWithoutRule: RMSprop"),
        (NoOptimizer, {}, r"NoOptimizer\.create_optimizer .*self\.optimizer is None"),
        (trainers.OffloadTrainer, {"optimizers": (torch.optim.Rprop([nn.Parameter(torch.ones(2))]),
                                              None)}, "optimizer of OffloadTrainer: Rprop"),
        (type("Mine", (trainers.OffloadMixin, SavesStates), {}), {},
         r"SavesStates\._save_optimizer_and_scheduler"),
    ],
)  # fmt: skip
def test_what_cannot_train_through_the_engine_is_refused_by_name(
    kind: Any, keys: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=what):
        make(kind, tmp_path / "run", offload=settings(tmp_path), **{**SHORT, **keys}).train()


def test_muon_has_the_arguments_numbers_and_adamw_those_of_its_keys(tmp_path: Path) -> None:
    optimizer = {"type": "muon", "adamw_lr": 1e-3, "ns_dtype": "fp32"}
    offload = config(tmp_path, HOST, optimizer=optimizer, precision="fp32")
    trainer = make(OffloadTrainer, tmp_path, offload=offload, **SHORT)
    trainer.train()
    rate, decay = trainer.args.learning_rate, trainer.args.weight_decay
    groups = trainer.optimizer.param_groups
    said = [(g["use_muon"], len(g["params"]), g["initial_lr"]) for g in groups]
    assert said == [(True, 21, rate), (False, 1, 1e-3), (False, 7, 1e-3)]
    assert [group["weight_decay"] for group in groups] == [decay, decay, 0.0]
    trainer.engine.close()
