"""Drawn programs of what people do to a model that computes, beside plain PyTorch's, to the bit."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import BudgetError, StateError
from tests.offload.engine_cases import MARKS, ON, config
from tests.offload.engine_states import bits

pytestmark = MARKS
WIDTH, BATCH = 32, 6
FEW, MANY = 3, 1500


# ---------------------------------------------------------------------------------------- layers
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class Named(Block):
    """Takes its input by name alone, and gives it back in a dictionary."""

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return {"x": super().forward(x) * scale, "of": (x.shape,)}


class Stepwise(Block):
    """Gives one result after another: its modules are called when its own call has returned."""

    def forward(self, x: Tensor) -> Any:
        for module in (self.norm, self.up, self.down):
            x = module(x)
            yield x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gru(x[:, None])[0][:, 0]
        return x + y


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x[None])[0]
        return y


class Counting(nn.Module):
    """Buffers, in place and anew, an attribute, and a norm that is updated."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean * 0.5 + x.detach().mean(0).to(self.mean)
        self.seen += 1
        y: Tensor = self.linear(self.norm(x)) + self.mean + self.calls
        return y.tanh()


class Direct(nn.Module):
    """Parameters of its own, and weights of modules that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.lists = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(2))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x * self.gain, self.unused.weight.t(), self.unused.bias)
        for each in self.lists:
            y = y @ each
        return y.tanh()


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3, padding=1))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.conv(x.view(len(x), 4, -1)))
        return x + y.reshape(x.shape)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


KINDS: list[Callable[[], nn.Module]] = [
    Block, Block, Named, Stepwise, Recurrent, Attending, Counting, Direct, Convolving, Checkpointed,
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
]  # fmt: skip


class Net(nn.Module):
    """A table, layers of drawn kinds, some of them the same object, and a head that may be tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.table = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(draw.randint(2, 6)):
            shared = len(self.layers) > 0 and draw.random() < 0.2
            self.layers.append(draw.choice(list(self.layers)) if shared else draw.choice(KINDS)())
        self.order = [*range(len(self.layers))]
        if draw.random() < 0.3:
            self.order.append(draw.choice(self.order))  # used twice
        if draw.random() < 0.3:
            self.order.remove(draw.choice(self.order))  # or never
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.how = draw.choice(["own", "tied", "read"])
        if self.how == "tied":
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, prompt: Tensor | None = None) -> Tensor:
        x: Any = self.table(tokens)
        if prompt is not None:
            x = x + prompt
        for number in self.order:
            layer = self.layers[number]
            if isinstance(layer, Named):
                x = layer(x=x, scale=0.5)["x"]
            elif isinstance(layer, Stepwise):
                *_, x = layer(x)
            else:
                x = layer(x)
        if self.how == "read":
            return torch.nn.functional.linear(x, self.table.weight)
        y: Tensor = self.head(x)
        return y


# -------------------------------------------------------------------------------------- programs
class Run:
    """One program's state: `model` is plain, or in tiers."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self.hooks: list[Any] = []
        self.noted: list[bytes] = []

    def note(self, *values: Any) -> None:
        self.noted += [
            bits(value.detach().float().contiguous()) if isinstance(value, Tensor) else
            repr(value).encode() for value in values
        ]  # fmt: skip

    def called(self, seed: int, prompt: Tensor | None = None) -> Tensor:
        torch.manual_seed(seed)
        logits: Tensor = self.model(torch.randint(0, 40, (BATCH,), device=ON), prompt)
        return logits


Step = Callable[[Run, random.Random], None]


def calls(run: Run, draw: random.Random) -> None:
    contexts = [torch.no_grad, torch.inference_mode, contextlib.nullcontext]
    cast = draw.random() < 0.2
    with (
        draw.choice(contexts)(),
        torch.autocast(torch.device(ON).type, torch.bfloat16, enabled=cast),
    ):
        for _ in range(draw.randint(1, 2)):
            run.note(run.called(draw.randrange(99)))


def calls_a_part(run: Run, draw: random.Random) -> None:
    layer = draw.choice(list(run.model.layers))
    given = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(3)).to(ON)
    with torch.no_grad():
        torch.manual_seed(1)
        if isinstance(layer, Named):
            run.note(layer(x=given)["x"])
        elif isinstance(layer, Stepwise):
            for each in layer(given):
                run.note(each)
                if draw.random() < 0.3:
                    run.note(run.called(draw.randrange(99)))
                    torch.manual_seed(1)
                if draw.random() < 0.2:
                    break
        else:
            run.note(layer(given))


def trains_a_prompt(run: Run, draw: random.Random) -> None:
    run.model.requires_grad_(False)
    prompt = torch.zeros(WIDTH, requires_grad=True, device=ON)
    logits = run.called(draw.randrange(99), prompt)
    if draw.random() < 0.3:
        with torch.no_grad():
            run.note(run.called(5))
    logits.square().sum().backward()
    assert prompt.grad is not None
    run.note(logits, prompt.grad)


def another_mode(run: Run, draw: random.Random) -> None:
    target = draw.choice([run.model, *run.model.layers])
    target.train(draw.random() < 0.5)


def loads(run: Run, draw: random.Random) -> None:
    scale = draw.choice([0.5, 1.0, 1.25])
    state = {name: t * scale for name, t in run.model.state_dict().items()}
    if draw.random() < 0.3:
        del state[draw.choice(list(state))]
    run.note(run.model.load_state_dict(state, strict=False))


def reads(run: Run, draw: random.Random) -> None:
    with draw.choice([torch.no_grad, contextlib.nullcontext])():
        for name, param in run.model.named_parameters():
            run.note(name, param.sum() if draw.random() < 0.5 else param.reshape(-1)[:3])
    run.note(*run.model.state_dict().values())
    run.note(*run.model.buffers())


def writes(run: Run, draw: random.Random) -> None:
    param = draw.choice(list(run.model.parameters()))
    if draw.random() < 0.3:
        param.data = param.data * 0.75
    elif draw.random() < 0.3:
        param.data.mul_(1.25)
    elif draw.random() < 0.5:
        nn.init.uniform_(param, -0.1, 0.1, generator=torch.Generator(ON).manual_seed(4))
    else:
        with torch.no_grad():
            param[..., 0] += 0.5


def writes_gathered(run: Run, draw: random.Random) -> None:
    module = draw.choice(list(run.model.layers))
    with contextlib.ExitStack() as stack, torch.no_grad():
        with contextlib.suppress(StateError):  # of the plain one
            stack.enter_context(offload.dispatched(run.model).gathered(module))
        for param in module.parameters():
            param.mul_(0.9)
        if draw.random() < 0.3:
            run.note(run.called(7))


def hooks(run: Run, draw: random.Random) -> None:
    module = draw.choice(list(run.model.modules()))
    other = draw.choice(list(run.model.parameters()))
    if draw.random() < 0.5:

        def before(_: Any, args: Any, kwargs: Any) -> None:
            run.note(len(args), sorted(kwargs), other.sum())

        run.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        return

    def after(_: Any, args: Any, output: Any) -> Any:
        return output * 0.5 + other.detach().mean() if isinstance(output, Tensor) else None

    run.hooks.append(module.register_forward_hook(after))


def removes_hooks(run: Run, draw: random.Random) -> None:
    for hook in run.hooks:
        hook.remove()
    run.hooks.clear()


class StopIt(Exception):
    pass


def stops(run: Run, draw: random.Random) -> None:
    error = draw.choice([StopIt, KeyboardInterrupt])
    module = draw.choice(list(run.model.modules()))
    at_first, modes = draw.random() < 0.5, draw.choice([torch.no_grad, contextlib.nullcontext])

    def stop(*_: Any) -> None:
        raise error

    hook = module.register_forward_pre_hook(stop) if at_first else (
        module.register_forward_hook(stop))  # fmt: skip
    try:
        with modes():
            run.called(3)
    except (StopIt, KeyboardInterrupt) as stopped:
        run.note(type(stopped).__name__)
    hook.remove()


def in_a_thread(run: Run, draw: random.Random) -> None:
    seed, values = draw.randrange(99), []

    @torch.no_grad()
    def call() -> None:
        values.append(run.called(seed))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    run.note(*values)


def exchanges(run: Run, draw: random.Random) -> None:
    """A layer for one of the user's own, in RAM."""
    number = draw.randrange(len(run.model.layers))
    torch.manual_seed(11)
    run.model.layers[number] = nn.Linear(WIDTH, WIDTH).to(ON)


def compiles(run: Run, draw: random.Random) -> None:
    layer = draw.choice([*run.model.layers])
    if type(layer) is Block:
        layer.compile(backend="eager")


def functionally(run: Run, draw: random.Random) -> None:
    name, param = draw.choice(list(run.model.named_parameters()))
    with torch.no_grad():
        torch.manual_seed(2)
        values = {name: param.detach().clone() * 0.5}
        given = torch.randint(0, 40, (BATCH,), device=ON)
        run.note(torch.func.functional_call(run.model, values, (given,)))


def moves(run: Run, draw: random.Random) -> None:
    assert run.model.to(ON).float() is run.model
    run.model.requires_grad_(draw.random() < 0.5)
    run.model.zero_grad()


def differentiates(run: Run, draw: random.Random) -> None:
    run.model.requires_grad_(False)
    prompt = torch.zeros(WIDTH, requires_grad=True, device=ON)
    run.note(*torch.autograd.grad(run.called(8, prompt).sum(), prompt, create_graph=True))


STEPS: list[Step] = [
    calls, calls, calls, calls_a_part, trains_a_prompt, another_mode, loads, reads, writes,
    writes_gathered, hooks, removes_hooks, stops, in_a_thread, exchanges, compiles, functionally,
    moves, differentiates,
]  # fmt: skip
PLACEMENTS: list[Any] = ["host", "nvme", "nvme", {"host": "50%", "nvme": "50%"}]


def places(folder: Path, draw: random.Random) -> dict[str, Any]:
    host = draw.choice(["160KiB", "220KiB", "300KiB", "8MiB"])
    groups = draw.choice([[], ["Linear"]])
    return config(
        folder, {"parameters": draw.choice(PLACEMENTS)}, prefetch=draw.randint(0, 3),
        budget={"host": host, "nvme": "64MiB"}, groups={"blocks": groups} if groups else {},
    )  # fmt: skip


@contextlib.contextmanager
def no_collection(draw: random.Random) -> Iterator[None]:
    """At times nothing collects garbage meanwhile: no memory may wait for that."""
    if draw.random() < 0.5:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_one(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    keys = places(folder, draw)
    plain, model = Run(Net(seed).to(ON)), Run(Net(seed).to(ON))
    try:
        offload.dispatch(model.model, keys)
    except BudgetError:
        keys["budget"]["host"] = "8MiB"
        offload.dispatch(model.model, keys)
    done: list[str] = []
    with offload.dispatched(model.model) as dispatched, no_collection(draw):
        for _ in range(draw.randint(2, 10)):
            step, chance = draw.choice(STEPS), draw.randrange(1 << 30)
            done.append(step.__name__)
            step(plain, random.Random(chance))
            step(model, random.Random(chance))
            assert model.noted == plain.noted, (seed, keys, done)
        dispatched.check_integrity()
        for group in dispatched.store.groups:
            assert not group.is_entered, (seed, done)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler: plain PyTorch has them, too
def test_drawn_programs_are_those_of_plain_pytorch(tmp_path: Path, long: bool) -> None:
    for seed in range(MANY if long else FEW):
        run_one(seed, tmp_path)
