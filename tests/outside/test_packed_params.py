"""A packed parameter [E, ...] whose rows are in groups of their own is, to those who use it, the
one tensor that it is without: split and whole, a model trains to the same bits."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.tiers.errors import UnsupportedError
from offload.zero.groups import parameter_grouping

transformers = pytest.importorskip("transformers")

NAME = "model.layers.0.mlp.experts.gate_up_proj"
OTHER = "model.layers.1.mlp.experts.down_proj"
WHOLE = {"parameters": "host", "gradients": "host", "optimizer": "host"}
ADAMW = {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1}
Engine = Any


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def data(count: int, length: int = 3) -> list[Tensor]:
    """Few tokens: most experts have none."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (1, length), generator=generator) for _ in range(count)]


class Pair:
    """The same training with tables split and whole."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._patch = patch
        self.engines: list[Engine] = []

    def make(
        self, place: str = "nvme", prepare: Callable[[nn.Module], Any] = lambda model: None,
        **keys: Any,
    ) -> list[Engine]:  # fmt: skip
        """`prepare` may change the model, and may return param groups."""
        self._patch.setattr(
            parameter_grouping, "SMALL_UNIT_NUMEL", 0
        )  # blocks, as in a large model
        for min_numel, home in (1 << 40, "host"), (0, place):
            self._patch.setattr(parameter_grouping, "SMALL_TABLE_NUMEL", min_numel)
            model = tiny()
            groups = prepare(model)
            given = {} if groups is None else {"parameters": groups}
            placement = {**dict.fromkeys(WHOLE, home), **keys.get("placement", {})}
            config = {
                "precision": "fp32", "nvme": {"paths": [str(self._folder)]}, "optimizer": ADAMW,
                **keys, "placement": placement,
            }  # fmt: skip
            self.engines.append(offload.initialize(model, config, **given))
        assert bool(self.engines[1].store.packed)
        assert not self.engines[0].store.packed
        return self.engines

    def train(self) -> None:
        for tokens in data(3):
            losses = []
            for engine in self.engines:
                loss = loss_of(engine, tokens)
                engine.backward(loss)
                losses.append(loss.item())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            assert losses[0] == losses[1]
        self.compare()

    def compare(self) -> None:
        whole, split = (engine.module.state_dict() for engine in self.engines)
        for name, value in whole.items():
            assert torch.equal(value, split[name]), name
        states = [engine.optimizer.state_dict()["state"] for engine in self.engines]
        assert states[0].keys() == states[1].keys()
        for number, state in states[0].items():
            for field, value in state.items():
                assert torch.equal(value, states[1][number][field]), (number, field)


def loss_of(engine: Engine, tokens: Tensor) -> Tensor:
    return engine.module(tokens, labels=tokens).loss


def param(engine: Engine, name: str = NAME) -> Any:
    return engine.module.get_parameter(name)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(tmp_path, monkeypatch)
    yield made
    for engine in made.engines:
        engine.close()


def _other_numbers(model: nn.Module) -> Any:
    mine = [p for name, p in model.named_parameters() if "gate_up" in name]
    rest = [p for name, p in model.named_parameters() if "gate_up" not in name]
    return [{"params": mine, "weight_decay": 0.0, "lr": 3e-3}, {"params": rest}]


def _freeze(part: str) -> Callable[[nn.Module], None]:
    def freeze(model: nn.Module) -> None:
        for name, each in model.named_parameters():
            each.requires_grad_(part not in name)

    return freeze


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare", [_other_numbers, _freeze("down_proj"), _freeze("experts")],
    ids=["param groups", "half frozen", "frozen"],
)  # fmt: skip
def test_param_groups_and_frozen_experts(pair: Pair, prepare: Any) -> None:
    pair.make(prepare=prepare)
    pair.train()


def test_what_rows_cannot_do_is_refused(pair: Pair) -> None:
    _, engine = pair.make()
    loss = loss_of(engine, data(1)[0])
    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad of .*gate_up_proj"):
        torch.autograd.grad(loss, list(engine.module.parameters()))
    with pytest.raises(UnsupportedError, match="comes in rows"):
        param(engine).register_hook(lambda gradient: gradient)
    with pytest.raises(RuntimeError, match="in-place"):
        param(engine).mul_(2.0)
    loss.backward()
    with pytest.raises(UnsupportedError, match=r"gate_up_proj\.grad is written"):
        param(engine).grad += torch.ones(param(engine).shape)
    param(engine).grad = torch.ones(param(engine).shape)
    with pytest.raises(UnsupportedError, match=r"gate_up_proj\.grad was set to a tensor"):
        engine.optimizer.step()
    engine.close()
    assert torch.equal(param(engine).grad, torch.ones(param(engine).shape))


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_experts_without_tokens_are_updated_in_the_step_where_others_are_in_backward(
    pair: Pair, place: str
) -> None:
    pair.make(place, optimizer={**ADAMW, "in_backward": True})
    pair.train()


# ---------------------------------------------------------------- drawn programs
def _optimizer_step(engine: Engine, draw: random.Random) -> None:
    engine.optimizer.step()


def _backward(engine: Engine, draw: random.Random) -> None:
    tokens = torch.tensor([[draw.randrange(64) for _ in range(draw.choice([2, 3, 20]))]])
    engine.seen.append(loss_of(engine, tokens).detach().clone())
    engine.backward(loss_of(engine, tokens))


def _evaluate(engine: Engine, draw: random.Random) -> None:
    with draw.choice([torch.no_grad, torch.inference_mode])():
        tokens = torch.tensor([[draw.randrange(64) for _ in range(4)]])
        engine.seen.append(engine.module(tokens).logits.clone())


def _zero(engine: Engine, draw: random.Random) -> None:
    engine.optimizer.zero_grad(set_to_none=draw.random() < 0.7)


def _one_gradient(engine: Engine, draw: random.Random) -> None:
    one = param(engine, draw.choice([NAME, OTHER]))
    what = draw.randrange(4)
    if what == 0:
        one.grad = None
    elif one.grad is not None and what == 1:
        one.grad.mul_(draw.choice([0.5, -1.0, 0.0]))
    elif one.grad is not None:
        engine.seen.append(one.grad.clone())
        engine.seen.append(one.grad.norm() > 0)


def _clip(engine: Engine, draw: random.Random) -> None:
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), draw.choice([0.3, 3.0]))


def _write(engine: Engine, draw: random.Random) -> None:
    one = param(engine, draw.choice([NAME, OTHER]))
    with torch.no_grad():
        if draw.random() < 0.5:
            with engine.gathered(one):
                one[draw.randrange(8)] *= draw.random()
        else:
            one.mul_(draw.uniform(0.9, 1.1))


def _read(engine: Engine, draw: random.Random) -> None:
    one = param(engine, draw.choice([NAME, OTHER]))
    engine.seen.append(one.detach()[draw.randrange(8)].clone())


def _numbers(engine: Engine, draw: random.Random) -> None:
    group = engine.optimizer.param_groups[0]
    group["lr"] = draw.choice([1e-2, 3e-3])
    group["weight_decay"] = draw.choice([0.0, 0.3])


def _reload(engine: Engine, draw: random.Random) -> None:
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.module.load_state_dict(engine.module.state_dict())


def _frozen(engine: Engine, draw: random.Random) -> None:
    engine.module.zero_grad()
    param(engine, NAME).requires_grad_(draw.random() < 0.5)


ACTIONS = [
    *[_backward] * 4, *[_optimizer_step] * 4, *[_zero] * 2, _one_gradient, _one_gradient,
    _clip, _evaluate, _write, _read, _numbers, _reload, _frozen,
]  # fmt: skip


def test_drawn_programs(pair: Pair, long: bool) -> None:
    for seed in range(30 if long else 1):
        choose = random.Random(seed)
        masters = choose.choice(["fp32", "bf16"])
        pair.engines.clear()
        engines = pair.make(choose.choice(["host", "nvme"]), precision=masters, clip_grad_norm=1.0)
        for engine in engines:
            engine.seen = []
        done = []
        for number in range(25):
            action = choose.choice(ACTIONS)
            done.append(action.__name__)
            for engine in engines:
                action(engine, random.Random(f"{seed} {number}"))
            for whole, split in zip(*(engine.seen for engine in engines), strict=True):
                assert torch.equal(whole, split), (seed, number, done)
        pair.compare()
        for engine in engines:
            engine.close()
