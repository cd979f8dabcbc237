"""A model that is trained, computed with, closed, copied, saved and trained again, in drawn orders
and by every way that leads into an engine, is at each point what it is in plain PyTorch.

Each program is a list of steps, and is run twice: `Plain` takes them as a program without offload
does, `Offloaded` through engines, dispatch and the integrations. After each step the values are
compared, those that the step does not train bit for bit.
"""

import copy
import gc
import importlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import offload
from offload.engine_lookup import tiers_of
from offload.errors import StateError
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config
from tests.outside.trainer_cases import Rows, forget, tiny_llama, transformers, values_of

accelerate = pytest.importorskip("accelerate")
trainers = importlib.import_module("offload.integrations.transformers")
deepspeed = importlib.import_module("offload.deepspeed")

pytestmark = pytest.mark.usefixtures("quiet_trainers")

LR, PASSES, CLOSE = 1e-3, 2, 1e-6
EPS = 1e-3  # with torch's 1e-8 a step divides rounding by rounding
LAYER = "LlamaDecoderLayer"
KEEP = ["host", None]


def rows(seed: int) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(2 * PASSES, seed), batch_size=2)


def adamw(model: nn.Module, lr: float = LR) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=EPS)


class Stop(Exception):
    """Raised amid a loop."""


class Plain:
    trainer: Any = transformers.Trainer

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Any = tiny_llama()
        self.saved: dict[str, Tensor] = {}
        self.kept: list[Any] = []  # what a notebook's variables hold

    # ---------------------------------------------------------------- training
    def own_loop(self, seed: int, lr: float, **_: Any) -> None:
        optimizer = self.optimizer(lr)
        for batch in rows(seed):
            self.model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def optimizer(self, lr: float) -> Any:
        self.model.zero_grad()
        return adamw(self.model, lr)

    def broken_loop(self, seed: int, **_: Any) -> None:
        """An exception ends a loop between backward and step."""
        self.model.zero_grad()
        self.model(**next(iter(rows(seed)))).loss.backward()
        self.model.zero_grad()

    def arguments(self, seed: int, lr: float) -> Any:
        return transformers.TrainingArguments(
            output_dir=str(self.folder / "out"), max_steps=PASSES, per_device_train_batch_size=2,
            learning_rate=lr, adam_epsilon=EPS, weight_decay=0.01,
            lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[],
            use_cpu=True, disable_tqdm=True, seed=seed, save_strategy="no", logging_steps=1,
        )  # fmt: skip

    def make_trainer(self, seed: int, lr: float, **_: Any) -> Any:
        forget()
        return self.trainer(
            model=self.model, args=self.arguments(seed, lr), eval_dataset=Rows(4, 9),
            train_dataset=Rows(2 * PASSES, seed), **self.more(),
        )  # fmt: skip

    def more(self) -> dict[str, Any]:
        """Arguments that only the trainer of an engine takes."""
        return {}

    def hf_trainer(self, seed: int, again: bool, **keys: Any) -> list[float]:
        trainer = self.make_trainer(seed, **keys)
        self.kept.append(trainer)
        trainer.train()
        if again:
            trainer.train()
        return [trainer.evaluate()["eval_loss"]]

    def evaluate(self, seed: int, **keys: Any) -> list[float]:
        """By a trainer that has trained nothing."""
        return [self.make_trainer(seed, **keys).evaluate()["eval_loss"]]

    def accelerate(self, seed: int, lr: float, **_: Any) -> None:
        forget()
        accelerator, optimizer = self.accelerator(), self.optimizer(lr)
        model, optimizer, loader = accelerator.prepare(self.model, optimizer, rows(seed))
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    def accelerator(self) -> Any:
        return accelerate.Accelerator(cpu=True)

    def deepspeed(self, seed: int, lr: float, **keys: Any) -> None:
        self.own_loop(seed, lr)

    # ---------------------------------------------------------------- the rest
    def dispatch(self, seed: int, **_: Any) -> list[float]:
        with torch.no_grad():
            out: Tensor = self.model(**next(iter(rows(seed)))).logits
        return out.flatten().tolist()

    def close(self, **_: Any) -> None:
        pass

    def duplicate(self, **_: Any) -> None:
        self.model = copy.deepcopy(self.model)

    def pickle(self, **_: Any) -> None:
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        self.model = torch.load(file, weights_only=False)

    def collect(self, **_: Any) -> None:
        self.kept.clear()
        gc.collect()

    def save(self, **_: Any) -> None:
        self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self, **_: Any) -> None:
        if self.saved:
            self.model.load_state_dict(self.saved)


class Offloaded(Plain):
    """The same steps through engines. `placement` and `keep` are drawn."""

    trainer = trainers.OffloadTrainer

    def configuration(self, **keys: Any) -> dict[str, Any]:
        return config(
            self.folder, self.placement, budget={"host": "4MiB", "nvme": "16MiB"},
            groups={"blocks": [LAYER]}, **keys,
        )  # fmt: skip

    def optimizer(self, lr: float) -> Any:
        keys = self.configuration(optimizer={"type": "adamw", "lr": lr, "eps": EPS})
        if tiers_of(self.model):  # a loop of one's own is told what to do
            with pytest.raises(StateError, match="close"):
                offload.initialize(self.model, keys)
            self.close()
        return offload.initialize(self.model, keys).optimizer

    def broken_loop(self, seed: int, **_: Any) -> None:
        keys = self.configuration()
        self.close()

        def loop() -> None:
            with offload.initialize(self.model, keys):
                self.model(**next(iter(rows(seed)))).loss.backward()
                raise Stop

        with pytest.raises(Stop):
            loop()
        assert all(p.grad is None for p in self.model.parameters())

    def more(self) -> dict[str, Any]:
        return {"offload": self.configuration()}

    def accelerator(self) -> Any:
        from offload.integrations.accelerate import OffloadAccelerator

        return OffloadAccelerator(cpu=True)

    def deepspeed(self, seed: int, lr: float, **keys: Any) -> None:
        numbers = {"type": "AdamW", "params": {"lr": lr, "eps": EPS, "weight_decay": 0.01}}
        engine, *_ = deepspeed.initialize(
            model=self.model,
            config={
                "train_micro_batch_size_per_gpu": 2, "optimizer": numbers,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": 3}, "offload": self.configuration(),
            },
        )  # fmt: skip
        for batch in rows(seed):
            engine.backward(engine(**batch).loss)
            engine.step()

    def dispatch(self, seed: int, **keys: Any) -> list[float]:
        self.close()
        offload.dispatch(self.model, self.configuration())
        return super().dispatch(seed)

    def close(self, **_: Any) -> None:
        for owner in tiers_of(self.model):
            owner.close(self.keep) if self.keep else owner.close()
        assert all(type(p) is nn.Parameter for p in self.model.parameters())

    def duplicate(self, **_: Any) -> None:
        self.close()
        super().duplicate()

    def pickle(self, **_: Any) -> None:
        self.close()
        super().pickle()


TRAINS = ["own_loop", "hf_trainer", "accelerate", "deepspeed", "broken_loop"]
OTHERS = ["evaluate", "dispatch", "close", "duplicate", "pickle", "collect", "save", "load"]
KINDS = ["hf_trainer", "accelerate", "deepspeed", "own_loop", "dispatch"]
ORDERS = 30  # of each kind


def program(kind: str, number: int) -> list[tuple[str, dict[str, Any]]]:
    """Steps, of which two are of this kind, with something between them."""
    draw = random.Random(f"{kind} {number}")
    between = [draw.choice([*TRAINS, *OTHERS]) for _ in range(draw.randint(0, 2))]
    after = [draw.choice([*TRAINS, *OTHERS]) for _ in range(draw.randint(1, 2))]
    names = [draw.choice(TRAINS + OTHERS), kind, *between, kind, *after]
    return [(name, settings_of(draw)) for name in names]


def settings_of(draw: random.Random) -> dict[str, Any]:
    return {
        "seed": draw.randint(0, 3), "lr": draw.choice([LR, 3 * LR]), "again": draw.random() < 0.3,
        "keep": draw.choice(KEEP),
        "placement": draw.choice([HOST, NVME]),
    }  # fmt: skip


def run(steps: list[tuple[str, dict[str, Any]]], folder: Path) -> None:
    plain, lives = Plain(folder / "plain"), Offloaded(folder)
    for number, (name, keys) in enumerate(steps):
        where = f"step {number} of {[name for name, _ in steps]}: {keys}"
        lives.keep, lives.placement = keys["keep"], keys["placement"]
        before = values_of(lives.model)
        take: Callable[..., Any] = getattr(lives, name)
        compare(take(**keys), getattr(plain, name)(**keys), 1e-5, where)
        if name in OTHERS and name != "load":
            assert_same_bits(before, values_of(lives.model))
        values = values_of(lives.model)
        compare(values, values_of(plain.model), CLOSE, where)
        plain.model.load_state_dict(values)  # the next step is compared alone
    lives.keep = None
    lives.close()


def compare(actual: Any, expected: Any, atol: float, where: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=atol, msg=lambda text: f"{where}: {text}"
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_models_second_life_is_that_of_plain_pytorch(
    kind: str, long: bool, tmp_path: Path
) -> None:
    for number in range(ORDERS if long else 1):
        run(program(kind, number), tmp_path)
