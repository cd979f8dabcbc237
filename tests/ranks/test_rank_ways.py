"""Ranks that go different ways: other branches, a use order unlike the registration order,
passes that are dropped; and what is written and read by all of them together."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
from offload.errors import ConfigError, StateError
from tests.offload.engine_cases import (
    HOST,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    parameters_of,
    seeded,
    states_of,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER

WIDTH, STEPS = 32, 4
IN_BACKWARD: dict[str, Any] = {"optimizer": {**OPTIMIZER, "in_backward": True}}
PICKS: dict[str, Any] = {"groups": {"blocks": ["Pick"]}}
Values = dict[str, Tensor]


def keys_of(folder: str, stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "timeout_s": 10, **more.pop("zero", {})}
    keys = {"budget": BUDGET, "optimizer": OPTIMIZER, **more}
    return config(Path(folder), keys.pop("placement", HOST), zero=zero, **keys)


class Pick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return x + torch.tanh(self.branches[choice](x))


class Picks(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Pick() for _ in range(blocks))

    def forward(self, x: Tensor, choices: int) -> Tensor:
        """`choices`: a bit per block."""
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x, choices % 2)
            choices //= 2
        return x.square().mean()


def inputs(number: int) -> Tensor:
    seed = 10 * number + dist.get_rank()
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def in_turn(program: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [program(*call) for call in calls]


def run_in_turn(
    world_size: int, folder: Path, program: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> list[list[Any]]:
    """What `program` returns of each of `calls`, by rank: starting ranks takes longer than most."""
    return run_ranks(world_size, folder, in_turn, program, calls, timeout_s=120)


def step(engine: offload.Engine) -> None:
    engine.optimizer.step()
    engine.optimizer.zero_grad()


# ------------------------------------------------------------------------- branches and orders
def pick(folder: str, stage: int, more: dict[str, Any]) -> Values:
    # where rank 0 takes the branches of the step before, rank 1 takes others, and so on
    choices = ([0, 0, 255, 240], [0, 255, 255, 15])[dist.get_rank()]
    with offload.initialize(seeded(Picks), keys_of(folder, stage, **PICKS, **more)) as engine:
        for number in range(STEPS):
            engine.backward(engine.module(inputs(number), choices[number]))
            step(engine)
        return states_of(engine)


@pytest.mark.parametrize("more", [{}, IN_BACKWARD])
def test_ranks_on_other_branches_do_not_wait_for_each_other(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Nine groups: more than are reduced at a time."""
    calls = [(str(tmp_path), stage, more) for stage in (1, 2, 3)]
    by_rank = run_in_turn(2, tmp_path, pick, calls)
    for values in (*by_rank[0], *by_rank[1]):
        assert_same_bits(values, by_rank[0][0])


# ------------------------------------------------------------------------- a dropped pass
def drop_a_pass(folder: str, stage: int, dropped: bool) -> Values:
    data = batches(STEPS + 1, seed=dist.get_rank())
    with offload.initialize(seeded(TinyLM), keys_of(folder, stage)) as engine:
        for number in range(STEPS):
            if number == 2 and dropped:
                engine.backward(engine.module.loss(data[-1]))  # type: ignore[operator]
                engine.optimizer.zero_grad()
            engine.backward(engine.module.loss(data[number]))  # type: ignore[operator]
            step(engine)
        return parameters_of(engine)


@pytest.mark.slow
def test_a_dropped_pass_leaves_nothing_behind_on_any_rank(tmp_path: Path) -> None:
    calls = [(str(tmp_path), stage, dropped) for stage in (0, 1, 3) for dropped in (False, True)]
    by_rank = run_in_turn(2, tmp_path, drop_a_pass, calls)
    for number, values in itertools.chain(*map(enumerate, by_rank)):
        assert_same_bits(values, by_rank[0][number - number % 2])


# ------------------------------------------------------------------------- a kept gradient
def keep_on_one(folder: str, keeps: bool) -> Values:
    with offload.initialize(seeded(TinyLM), keys_of(folder, 3)) as engine:
        model: Any = engine.module
        for tokens in batches(STEPS, seed=dist.get_rank()):
            model.loss(tokens).backward()
            kept = model.head.weight.grad if keeps and dist.get_rank() == 0 else None
            engine.optimizer.step()
            model.zero_grad()
            engine.optimizer.zero_grad()
            if kept is not None:
                with pytest.raises(StateError, match=r"cleared.*clone"):
                    kept.sum()
        return states_of(engine)


def test_a_gradient_that_one_rank_keeps_holds_up_no_other(tmp_path: Path) -> None:
    calls = [(str(tmp_path), keeps) for keeps in (False, True)]
    for without, states in run_in_turn(2, tmp_path, keep_on_one, calls):
        assert_same_bits(states, without)


# ------------------------------------------------------------------------- written together
def write_one(folder: str) -> tuple[Values, Values, Values]:
    """State dicts before and after one parameter is written, and what a checkpoint has."""
    with offload.initialize(seeded(TinyLM), keys_of(folder, 3)) as engine:
        engine.backward(engine.module.loss(batches(1, seed=dist.get_rank())[0]))  # type: ignore[operator]
        step(engine)
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        bias = engine.module.blocks[0].norm.bias
        with engine.gathered(bias), engine.gathered(bias), torch.no_grad():
            bias.fill_(0.25)
        after = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.save_checkpoint(Path(folder) / "written")
    with offload.initialize(seeded(TinyLM, seed=3), keys_of(folder, 1)) as engine:
        engine.load_checkpoint(Path(folder) / "written")
        return before, after, dict(engine.module.state_dict())


def test_one_parameter_is_written_and_nothing_else_changes(tmp_path: Path) -> None:
    """Also within another `gathered`."""
    for before, after, saved in run_ranks(2, tmp_path, write_one, str(tmp_path)):
        assert_same_bits(saved, after)
        assert (after.pop("blocks.0.norm.bias") == 0.25).all()
        before.pop("blocks.0.norm.bias")
        assert_same_bits(before, after)


def load_into(folder: str, stage: int) -> tuple[Values, Values]:
    given = {name: value + 1 for name, value in seeded(TinyLM).state_dict().items()}
    with offload.initialize(seeded(TinyLM, seed=2), keys_of(folder, stage)) as engine:
        engine.module.load_state_dict(given)
        return given, dict(engine.module.state_dict())


def test_a_state_dict_is_loaded_where_parameters_are_sharded(tmp_path: Path) -> None:
    for given, loaded in run_ranks(2, tmp_path, load_into, str(tmp_path), 3):
        assert_same_bits(loaded, given)


# ------------------------------------------------------------------------- what has to be alike
DIFFERENT: dict[str, dict[str, Any]] = {
    "zero.stage": {"zero": {"stage": 2}},
    "zero.reduce_dtype": {"zero": {"stage": 3, "reduce_dtype": "bf16"}},
    "precision": {"precision": "bf16"},
    "seed": {"seed": 1},
    "max_skipped_steps": {"max_skipped_steps": 7},
    "optimizer.lr": {"optimizer": {**OPTIMIZER, "lr": 1e-5}},
    "the model (": {},
    "the model's formats": {},
}


def initialize_otherwise(folder: str) -> list[tuple[str, str]]:
    refused = []
    for key, other in DIFFERENT.items():
        keys, blocks = keys_of(folder, 3), 2
        if dist.get_rank() == 1:
            keys |= other
            blocks = 3 if key == "the model (" else 2
        model: nn.Module = TinyLM(blocks)
        if dist.get_rank() == 1 and key == "the model's formats":
            model.bfloat16()
        try:
            offload.initialize(model, keys).close()
        except ConfigError as error:
            refused.append((key, str(error)))
    return refused


def test_ranks_with_other_configurations_are_told_which_key(tmp_path: Path) -> None:
    for refused in run_ranks(2, tmp_path, initialize_otherwise, str(tmp_path)):
        assert [key for key, _ in refused] == list(DIFFERENT)
        for key, text in refused:
            assert text.startswith(key)
            assert "rank 1 has another one than rank 0" in text


class OwnWays(nn.Linear):
    """Initialises itself from a number that no seed decides, and has a buffer like that."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, 1.0 + dist.get_rank())
        if hasattr(self, "scale"):
            nn.init.constant_(self.scale, 1.0 + dist.get_rank())


def initialize_in_own_ways(folder: str) -> list[Values]:
    begun = []
    for stage in (0, 1, 3):
        with torch.device("meta"):
            model = nn.Sequential(OwnWays(), nn.ReLU(), nn.Linear(4, 2))
        with offload.initialize(model, keys_of(folder, stage)) as engine:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            begun.append({**parameters_of(engine), **buffers})
    file = Path(folder) / f"{dist.get_rank()}.safetensors"
    save_file({f"0.{n}": p.detach() for n, p in seeded(OwnWays).named_parameters()}, file)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with offload.initialize(model, keys_of(folder, 3), weights=file) as engine:
        begun.append(parameters_of(engine))
    return begun


def test_ranks_that_initialise_otherwise_train_what_the_first_one_has(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, initialize_in_own_ways, str(tmp_path))
    for here, there in zip(first, second, strict=True):
        assert_same_bits(here, there)
        assert torch.equal(here["0.bias"], torch.ones(4))
    assert torch.equal(first[0]["0.scale"], torch.ones(4))
    assert_same_bits(first[0], first[1])
    assert_same_bits(first[0], first[2])
