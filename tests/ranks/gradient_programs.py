"""Training loops drawn by chance, of what users do with `param.grad`: run by every rank with its
own data, and by one process in plain PyTorch with all of it."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offload
from tests.offload.engine_cases import config, plan_for_a_gpu, seeded, states_of
from tests.ranks.programs import BUDGET, Branches

OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}  # rounding stays small
ZEROS: dict[str, Callable[[nn.Module, Any], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
}
NAMES = [name for name, param in Branches().named_parameters() if param.requires_grad]


@dataclass(frozen=True)
class Pass:
    tokens: tuple[Tensor, ...]  # by rank
    local: bool = False  # under no_sync


@dataclass(frozen=True)
class Use:
    """Something that is done with gradients: `what` it is, with which numbers."""

    what: str
    names: tuple[str, ...] = ()
    number: float = 0.0


@dataclass(frozen=True)
class Variant:
    stage: int
    placement: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    speculates: bool = False  # after every pass, as if it were the last of its step
    beside_gpu: bool = False  # for which host memory stands in


Program = list[Pass | Use]
READS = ("clip norm", "clip value", "mul", "add", "norm", "scaled copy")


@dataclass
class Outcome:
    numbers: list[float]
    states: dict[str, Tensor]
    error: str = ""
    kept: int = 0  # speculative updates that a step has made its own


def draw(seed: int, ranks: int, *, apart: bool) -> Program:
    """`apart`: ranks take different branches, so nothing is read of gradients that some of them do
    not see."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    program: Program = []
    own = False  # some gradient is a tensor of the user's
    for _ in range(chance.randint(2, 3)):
        for _ in range(chance.randint(1, 3)):
            program.append(_draw_pass(chance, generator, ranks, apart=apart))
            for _ in range(chance.choice([0, 0, 1, 1, 2])):
                use = _draw_use(chance, apart=apart, writes=not own)
                cleared = use.what == "zero" and "to zero" not in use.names[0]
                own = (own and not cleared) or use.what in ("set", "scaled copy")
                program.append(use)
        program.append(Use("step"))
        if chance.random() < 0.8:
            way = chance.choice([*ZEROS])
            program.append(Use("zero", (way,)))
            own = own and "to zero" in way
    return program


def _draw_pass(
    chance: random.Random, generator: torch.Generator, ranks: int, *, apart: bool
) -> Pass:  # fmt: skip
    branch = chance.choice((0, 1))
    tokens = []
    for _ in range(ranks):
        batch = torch.randint(37, (2, 7), generator=generator)
        batch[0, 0] = chance.randint(0, 36) if apart else 2 * chance.randint(0, 17) + branch
        tokens.append(batch)
    return Pass(tuple(tokens), local=chance.random() < 0.15)


def _draw_use(chance: random.Random, *, apart: bool, writes: bool) -> Use:
    some = tuple(sorted(chance.sample(NAMES, chance.randint(1, 4))))
    if apart:  # each rank sees its own gradients alone: all of them can be cleared
        return Use("zero", (chance.choice(["optimizer", "model"]),))
    whats = ["clear", "clear", "clear to zero", "zero"]
    what = chance.choice([*READS, "set", *whats] if writes else whats)
    if what == "zero":
        return Use(what, (chance.choice([*ZEROS]),))
    return Use(what, some, chance.choice([0.5, 0.1, 2.0, 0.01]))


# ---------------------------------------------------------------------------------- running one
def run(
    program: Program, model: nn.Module, optimizer: Any, one_pass: Callable[[Pass], None]
) -> list[float]:
    params, numbers = dict(model.named_parameters()), []
    for action in program:
        if isinstance(action, Pass):
            one_pass(action)
        else:
            numbers += use(action, model, params, optimizer)
    return numbers


def use(action: Use, model: nn.Module, params: dict[str, Any], optimizer: Any) -> list[float]:
    what, number = action.what, action.number
    trained = [params[name] for name in NAMES]
    if what == "step":
        optimizer.step()
    elif what == "zero":
        ZEROS[action.names[0]](model, optimizer)
    elif what == "clip norm":
        return [float(torch.nn.utils.clip_grad_norm_(trained, number))]
    elif what == "clip value" and any(param.grad is not None for param in trained):
        torch.nn.utils.clip_grad_value_(trained, number / 10)
    elif what != "clip value":  # torch's own takes no empty list
        found = [use_one(what, params[name], number) for name in action.names]
        return [each for each in found if each is not None]
    return []


def use_one(what: str, param: Any, number: float) -> float | None:
    grad = param.grad
    if what == "clear":
        param.grad = None
    elif what == "set":
        param.grad = torch.full(param.shape, number / 10, dtype=param.dtype)
    elif grad is None:
        pass
    elif what == "clear to zero":
        grad.zero_()
    elif what == "mul":
        grad.mul_(number)
    elif what == "add":
        grad.add_(torch.arange(grad.numel(), dtype=grad.dtype).view(grad.shape), alpha=number / 100)
    elif what == "scaled copy":
        param.grad = grad.clone() * number
    elif what == "norm":
        return float(grad.norm())
    return None


def alone(program: Program, ranks: int) -> Outcome:
    model = seeded(Branches)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **OPTIMIZER)

    def one_pass(action: Pass) -> None:
        losses = [model(tokens) for tokens in action.tokens]
        (torch.stack(losses).sum() / ranks).backward()

    numbers = run(program, model, optimizer, one_pass)
    return Outcome(numbers, dict(model.state_dict()))


def on_rank(program: Program, variant: Variant, folder: str) -> Outcome:
    """What this rank of all has in the end; or its error."""
    zero = {"stage": variant.stage, "timeout_s": 20.0}
    keys = config(Path(folder), variant.placement, budget=BUDGET, optimizer=OPTIMIZER, zero=zero)
    keys = {**keys, **variant.keys}
    with ExitStack() as stack:
        if variant.beside_gpu:
            plan_for_a_gpu(stack.enter_context(pytest.MonkeyPatch.context()))
        model = seeded(Branches, seed=dist.get_rank())
        engine = stack.enter_context(offload.initialize(model, keys))

        def one_pass(action: Pass) -> None:
            tokens = action.tokens[dist.get_rank()]
            if variant.speculates:
                stepper = engine._runtime.stepper
                stepper.policy.on = True
                stepper.policy.passes = stepper.passes.since_step() + 1
            with engine.no_sync() if action.local else nullcontext():
                engine.module(tokens).backward()

        try:
            numbers = run(program, engine.module, engine.optimizer, one_pass)
            kept = engine.report().trials.kept
            return Outcome(numbers, states_of(engine), kept=kept)
        except offload.OffloadError as error:
            return Outcome([], {}, f"{type(error).__name__}: {error}")


def on_ranks(
    programs: Sequence[Program], variants: Sequence[Variant], folder: str
) -> list[list[Outcome]]:
    return [[on_rank(each, variant, folder) for variant in variants] for each in programs]
