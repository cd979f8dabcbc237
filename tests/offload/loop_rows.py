"""The rows of docs/loops.md: loops as people write them."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.offload.engine_cases import ON
from tests.offload.interrupt_points import assert_at_rest
from tests.offload.loop_trial import OUT, WIDTH, Build, Loop, Row, Trial, blocks
from tests.offload.test_threads_and_forks import in_thread

ROWS: list[Row] = []
Numbers = list[float]


def row(
    section: str, text: str, *, build: Build = blocks,
    prepare: Callable[[Trial], None] | None = None, **keys: Any,
) -> Callable[[Loop], Loop]:  # fmt: skip
    """`keys` are the configuration's."""

    def append(loop: Loop) -> Loop:
        ROWS.append(
            Row(section=section, text=text, loop=loop, build=build, prepare=prepare, keys=keys)
        )
        return loop

    return append


def add(section: str, text: str, name: str, loop: Loop, **keys: Any) -> None:
    """A row whose loop is one call."""
    loop.__name__ = name
    row(section, text, **keys)(loop)


def at(part: str, section: str, text: str, **keys: Any) -> Callable[[Callable[..., Any]], Loop]:
    """A row whose loop is `Trial.train` with the decorated function as `part`."""

    def decorate(function: Callable[..., Any]) -> Loop:
        def loop(t: Trial) -> Numbers:
            changed: dict[str, Any] = {part: partial(function, t)}
            return t.train(**changed)

        loop.__name__ = function.__name__
        return row(section, text, **keys)(loop)

    return decorate


def array(tensor: Tensor) -> Any:
    """NumPy's, which torch gives of none on a GPU."""
    return tensor.numpy() if ON == "cpu" else tensor.cpu().numpy()


# ------------------------------------------------------------------------------------- zeroing
ZEROING = "Zeroing gradients"

add(ZEROING, "`optimizer.zero_grad()` after the step", "zero_after", lambda t: t.train())
add(ZEROING, "`optimizer.zero_grad()` before the forward", "zero_before",
    lambda t: t.train(before=lambda: t.optimizer.zero_grad(), zero=None))  # fmt: skip
add(ZEROING, "`optimizer.zero_grad()` between forward and backward", "zero_between",
    lambda t: t.train(extra=lambda: t.optimizer.zero_grad(), zero=None))  # fmt: skip
add(ZEROING, "`optimizer.zero_grad(set_to_none=False)`", "zero_to_zeros",
    lambda t: t.train(zero=lambda: t.optimizer.zero_grad(set_to_none=False)))  # fmt: skip
add(ZEROING, "`model.zero_grad()`", "model_zero",
    lambda t: t.train(zero=lambda: t.model.zero_grad()))  # fmt: skip


@at("zero", ZEROING, "`p.grad = None`")
def set_none(t: Trial) -> None:
    for p in t.params:
        p.grad = None


@at("zero", ZEROING, "`del p.grad`")
def delete_grad(t: Trial) -> None:
    for p in t.params:
        del p.grad


@at("zero", ZEROING, "`p.grad.zero_()`, `p.grad.detach_().zero_()`, `p.grad.data.zero_()`")
def zero_in_place(t: Trial) -> None:
    for number, p in enumerate(t.params):
        assert p.grad is not None
        if number % 3 == 0:
            p.grad.zero_()
        elif number % 3 == 1:
            p.grad.detach_()
            p.grad.zero_()
        else:
            p.grad.data.zero_()


add(ZEROING, "never: gradients of all steps add up", "never_zero", lambda t: t.train(zero=None))


@at("clip", ZEROING, "some parameters' `p.grad = None` before the step")
def some_none(t: Trial) -> None:
    for p in t.params[::3]:
        p.grad = None


# ------------------------------------------------------------------------------- accumulation
ACCUMULATION = "Accumulation"


def accumulate(t: Trial, passes: int, divide: bool = True, count: int = 6) -> Numbers:
    logged = []
    for number, (x, y) in enumerate(t.data(count), 1):
        loss = t.loss(x, y)
        (loss / passes if divide else loss).backward()
        logged.append(loss.item())
        if number % passes == 0:
            t.optimizer.step()
            t.optimizer.zero_grad()
    return logged


add(ACCUMULATION, "`(loss / 3).backward()`, a step after every third", "accumulated",
    lambda t: accumulate(t, 3))  # fmt: skip
add(ACCUMULATION, "the same with `gradient_accumulation_steps: 3`", "accumulated_and_said",
    lambda t: accumulate(t, 3), gradient_accumulation_steps=3)  # fmt: skip


add(ACCUMULATION, "`gradient_accumulation_steps: 3` and a step after every pass, as DeepSpeed "
    "wants it", "accumulated_by_others", lambda t: t.train(),
    gradient_accumulation_steps=3)  # fmt: skip


# ----------------------------------------------------------------------------------- clipping
CLIPPING = "Clipping"

add(CLIPPING, "`clip_grad_norm_(model.parameters(), 0.05)`", "clip_norm",
    lambda t: t.train(clip=lambda: clip_grad_norm_(t.model.parameters(), 0.05)))  # fmt: skip


@at("clip", CLIPPING, "`clip_grad_norm_(..., norm_type=inf)`, and 1, 3 and 0.5")
def clip_norm_other(t: Trial) -> list[Tensor]:
    return [clip_grad_norm_(t.params, 0.05, norm_type=p) for p in (math.inf, 1, 3.0, 0.5)]


@at("clip", CLIPPING, "`clip_grad_value_(model.parameters(), 0.001)`, with and without foreach")
def clip_value(t: Trial) -> None:
    half = len(t.params) // 2
    clip_grad_value_(t.params[:half], 0.001, foreach=True)
    clip_grad_value_(t.params[half:], 0.001, foreach=False)


@at("clip", CLIPPING, "by hand: norms of `p.grad.data`, then `p.grad.data.mul_(coefficient)`")
def clip_by_hand(t: Trial) -> Any:
    total = sum(p.grad.data.norm(2) ** 2 for p in t.params) ** 0.5  # type: ignore[union-attr]
    for p in t.params:
        p.grad.data.mul_(0.05 / (total + 1e-6))  # type: ignore[union-attr]
    return total


@at("clip", CLIPPING, "`get_total_norm` and `clip_grads_with_norm_`")
def clip_in_two(t: Trial) -> Tensor:
    total = nn.utils.get_total_norm([p.grad for p in t.params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(t.params, 0.05, total)
    return total


@at("clip", CLIPPING, "each layer on its own, and the head to another norm")
def clip_parts(t: Trial) -> list[Tensor]:
    return [clip_grad_norm_(layer.parameters(), 0.02 + 0.01 * i)
            for i, layer in enumerate(t.model)]  # fmt: skip


@at("clip", CLIPPING, "`clip_grad_norm: 0.05` in the configuration, for plain PyTorch's "
     "`clip_grad_norm_`", clip_grad_norm=0.05)  # fmt: skip
def clip_by_key(t: Trial) -> None:
    if t.engine is None:
        clip_grad_norm_(t.params, 0.05)


# ------------------------------------------------------------------------ reading and changing
GRADIENTS = "Reading and changing gradients"


@row(GRADIENTS, "`p.grad = flat[i:j].view_as(p)` once, and `flat.zero_()` before each pass")
def flat_buffer(t: Trial) -> Numbers:
    flat = torch.zeros(sum(p.numel() for p in t.params), device=ON)
    start = 0
    for p in t.params:
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    logged = []
    for x, y in t.data():
        flat.zero_()
        loss = t.loss(x, y)
        loss.backward()
        logged += [loss.item(), flat.norm().item(), float(clip_grad_norm_(t.params, 0.05))]
        t.optimizer.step()
    return logged


@at("clip", GRADIENTS,
    "`p.grad.mean()`, `.std()`, `.sum()`, `.histc()`, `.tolist()`, `.numpy()`, `[0]`")  # fmt: skip
def log_more(t: Trial) -> list[float]:
    logged = []
    for p in t.params:
        g: Any = p.grad
        logged += [g.mean(), g.std(), g.sum(), g.histc(4).max(), g.flatten()[0], g[0].sum()]
        logged += [torch.tensor(g.tolist()).max(), array(g).max(), g.cpu().numpy().min()]
    return [float(each) for each in logged]


class Unused(nn.Module):
    """One layer takes no part, another only at times, and at times without its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, OUT)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x).tanh()
        if self.calls % 3 != 2:
            h = F.linear(h, self.b.weight, self.b.bias if self.calls % 3 else None).tanh()
        y: Tensor = self.head(h)
        return y


add(GRADIENTS, "unused parameters: `p.grad is None`, and no update", "unused",
    lambda t: t.train(clip=lambda: [float(p.grad is None) for p in t.params]),
    build=Unused)  # fmt: skip


@row(GRADIENTS, "unused in this pass, zeros since `zero_grad(set_to_none=False)`", build=Unused)
def unused_but_zero(t: Trial) -> Numbers:
    def log() -> list[float]:
        return [-1.0 if p.grad is None else p.grad.norm().item() for p in t.params]

    return t.train(clip=log, zero=lambda: t.optimizer.zero_grad(set_to_none=False))


@at("clip", GRADIENTS, "masks and slices: `p.grad[0] = 0`, `p.grad.view(-1)[1:3].mul_(2)`, "
     "`p.grad *= mask`, `p.grad[p.grad < 0] = 0`")  # fmt: skip
def mask(t: Trial) -> None:
    for number, p in enumerate(t.params):
        assert p.grad is not None
        if number % 2:
            p.grad[0] = 0
            p.grad.view(-1)[1:3].mul_(2)
        else:
            p.grad *= (torch.arange(p.numel(), device=ON).view(p.shape) % 3 > 0).float()
            p.grad[p.grad < -0.01] = 0


@at("clip", GRADIENTS, "`p.grad.sign_()`, `torch.nan_to_num_(p.grad)`, `p.grad.clamp_(-1, 1)`, "
     "`p.grad.pow_(3)`")  # fmt: skip
def in_place(t: Trial) -> None:
    for number, p in enumerate(t.params):
        assert p.grad is not None
        if number % 4 == 0:
            p.grad.sign_()
        elif number % 4 == 1:
            torch.nan_to_num_(p.grad)
        elif number % 4 == 2:
            p.grad.clamp_(-1e-3, 1e-3)
        else:
            p.grad.pow_(3)


@at("clip", GRADIENTS, "`p.grad = p.grad * 2 + 0.1 * p.detach()`")
def set_computed(t: Trial) -> None:
    for p in t.params:
        assert p.grad is not None
        p.grad = p.grad * 2 + 0.1 * p.detach()


@at("clip", GRADIENTS, "`p.grad.data = new`, `p.grad.copy_(new)`, `p.grad.data.copy_(new)`")
def set_data(t: Trial) -> None:
    for number, p in enumerate(t.params):
        assert p.grad is not None
        new = p.grad.clone() * 0.5 + 0.01
        if number % 3 == 0:
            p.grad.data = new
        elif number % 3 == 1:
            p.grad.copy_(new)
        else:
            p.grad.data.copy_(new)


@row(GRADIENTS, "gradients of two tasks, the second projected off the first (PCGrad)")
def two_tasks(t: Trial) -> Numbers:
    logged = []
    for x, y in t.data():
        parts = []
        for sign in (1, -1):
            loss = t.loss(sign * x, y)
            loss.backward()
            parts.append([p.grad.clone() for p in t.params])  # type: ignore[union-attr]
            logged.append(loss.item())
            t.optimizer.zero_grad()
        for p, a, b in zip(t.params, *parts, strict=True):
            p.grad = a + b - (a * b).sum().clamp(max=0) / (a * a).sum() * a
        t.optimizer.step()
        t.optimizer.zero_grad()
    return logged


@at("backward", GRADIENTS, "`grads = torch.autograd.grad(loss, params)`; `p.grad = g`")
def autograd_grad(t: Trial, loss: Tensor) -> None:
    gradients = torch.autograd.grad(loss, t.params)
    assert all(p.grad is None for p in t.params)
    for p, gradient in zip(t.params, gradients, strict=True):
        p.grad = gradient


add(GRADIENTS, "`loss.backward(inputs=[the head's parameters])`", "backward_inputs",
    lambda t: t.train(backward=lambda loss: loss.backward(inputs=[*t.model[-1].parameters()]))
    )  # fmt: skip


@at("clip", GRADIENTS,
    "`torch._foreach_mul_(grads, 0.5)`, `torch._foreach_add_(grads, params, alpha=0.1)`"
    )  # fmt: skip
@torch.no_grad()
def foreach(t: Trial) -> list[Tensor]:
    gradients: list[Any] = [p.grad for p in t.params]
    torch._foreach_mul_(gradients, 0.5)
    torch._foreach_add_(gradients, t.params, alpha=0.1)
    return list(torch._foreach_norm(gradients))


add(GRADIENTS, "`p.grad.data_ptr()`", "data_pointer",
    lambda t: t.train(clip=lambda: t.params[0].grad.data_ptr() > 0))  # fmt: skip


@at("clip", GRADIENTS,
    "`copy.deepcopy(p.grad)`, `pickle.dumps(p.grad)`, `torch.save({...: p.grad})`")  # fmt: skip
def copied_gradients(t: Trial) -> list[float]:
    file = io.BytesIO()
    torch.save({n: p.grad for n, p in t.model.named_parameters()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    copied = [copy.deepcopy(t.params[0].grad), pickle.loads(pickle.dumps(t.params[1].grad))]
    return [each.sum().item() for each in [*copied, *loaded.values()]]


# ----------------------------------------------------------------------- mixed precision, scaler
SCALING = "Autocast and scaling"


@row(SCALING, "`GradScaler`: scale, backward, `unscale_`, clip, `step`, `update`")
def scaler(t: Trial) -> Numbers:
    scaler = torch.amp.GradScaler(ON, init_scale=1024.0, growth_interval=2)
    logged = []
    for x, y in t.data():
        loss = t.loss(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(t.optimizer)
        logged += [loss.item(), float(clip_grad_norm_(t.params, 0.05)), scaler.get_scale()]
        scaler.step(t.optimizer)
        scaler.update()
        t.optimizer.zero_grad()
    return logged


@row(SCALING, "`GradScaler` and a gradient that overflows: the step is skipped, the scale halves")
def scaler_overflow(t: Trial) -> Numbers:
    scaler = torch.amp.GradScaler(ON, init_scale=1024.0)
    logged = []
    for number, (x, y) in enumerate(t.data()):
        loss = t.loss(x, y)
        scaler.scale(loss * (math.inf if number == 2 else 1.0)).backward()
        scaler.step(t.optimizer)
        scaler.update()
        logged += [loss.item(), scaler.get_scale()]
        t.optimizer.zero_grad()
    return logged


@at("loss", SCALING, "`with torch.autocast('cpu', torch.bfloat16):` around forward and loss")
def autocast(t: Trial, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(ON, torch.bfloat16):
        return t.loss(x, y)


# ------------------------------------------------------------------------------------ weights
WEIGHTS = "Reading and changing weights"


def frozen_part(t: Trial) -> None:
    t.model[1].requires_grad_(False)


@at("extra", WEIGHTS,
    "L2 and L1 terms: `loss + 0.01 * sum((p ** 2).sum() for p in model.parameters())`")  # fmt: skip
def penalty(t: Trial) -> Any:
    squares = sum((p**2).sum() for p in t.params)
    return 0.01 * squares + 0.001 * sum(p.abs().sum() for p in t.params)


@row(WEIGHTS, "EMA: `shadow[name].lerp_(p.detach(), 0.1)`; evaluated with `p.data.copy_(shadow)`, "
     "then put back")  # fmt: skip
def ema(t: Trial) -> Numbers:
    shadow = {n: p.detach().clone() for n, p in t.model.named_parameters()}

    def follow() -> None:
        for name, p in t.model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)

    t.train(after=follow)
    kept = {n: p.data.clone() for n, p in t.model.named_parameters()}
    for name, p in t.model.named_parameters():
        p.data.copy_(shadow[name])
    shadowed = t.loss(*t.data()[0]).item()
    for name, p in t.model.named_parameters():
        p.data = kept[name]
    return [shadowed, *t.train(2)]


def average_before(t: Trial) -> None:
    average = torch.optim.swa_utils.AveragedModel(t.model)
    t.model.average = [average.to(ON)]  # a list: no submodule


@row(WEIGHTS, "`AveragedModel(model)` before `initialize`, `update_parameters(model)` in the loop",
     prepare=average_before)  # fmt: skip
def averaged(t: Trial) -> Numbers:
    average = t.model.average[0]
    logged = t.train(after=lambda: average.update_parameters(t.model))
    return [*logged, *(p.sum().item() for p in average.parameters())]


@row(WEIGHTS, "`AveragedModel(model)` after `initialize`")
def averaged_after(t: Trial) -> Numbers:
    torch.optim.swa_utils.AveragedModel(t.model)
    return []


@at("after", WEIGHTS, "under `no_grad`: `p.mul_(0.99)`, `p -= 0.01`, `p[0] = 0.3`, `p.copy_(...)`, "
     "`nn.init.zeros_(bias)`")  # fmt: skip
@torch.no_grad()
def write_weights(t: Trial) -> None:
    for number, p in enumerate(t.params):
        if p.dim() == 1:
            nn.init.zeros_(p)
        elif number % 3 == 0:
            p.mul_(0.99)
            p[0] = 0.3
        elif number % 3 == 1:
            p -= 0.01
        else:
            p.copy_(torch.ones_like(p) * 0.1)


@at("after", WEIGHTS, "`p.data = p.data * 0.5`")
def rebind(t: Trial) -> None:
    for p in t.params:
        p.data = p.data * 0.5


@row(WEIGHTS, "EMA with nothing copied: `backup = p.data`; `p.data = shadow`; evaluate; "
     "`p.data = backup`")  # fmt: skip
def moving_average_by_rebinding(t: Trial) -> Numbers:
    shadows = [p.data.clone() for p in t.params]
    x, y = t.data(1)[0]

    def average() -> float:
        backups = [p.data for p in t.params]
        for number, p in enumerate(t.params):
            shadows[number] = 0.9 * shadows[number] + 0.1 * p.data
            p.data = shadows[number]
        with torch.no_grad():
            loss = t.loss(x, y).item()
        for p, backup in zip(t.params, backups, strict=True):
            p.data = backup
        return loss

    return t.train(after=average)


@at("after", WEIGHTS, "under `no_grad`: `p.set_(tensor)`")
@torch.no_grad()
def set_to_another(t: Trial) -> None:
    for p in t.params:
        p.set_(p * 0.5)


@at("after", WEIGHTS, "`p.tolist()`, and a frozen `p.numpy()`", prepare=frozen_part)
def lists_and_arrays(t: Trial) -> list[float]:
    lists = [value for p in t.params if p.ndim == 1 for value in p.tolist()]
    return [*lists, *(float(array(p).sum()) for p in t.model[1].parameters())]


@row(WEIGHTS, "writing to the entries of `model.state_dict()`: `own[name].copy_(x)`")
def write_state_dict(t: Trial) -> Numbers:
    numbers = t.train()

    def load(values: float) -> None:  # nothing of the dict outlives this
        own = t.model.state_dict()
        for name, value in own.items():
            if name.endswith("bias"):
                value.copy_(torch.full_like(value, values))
        t.model.load_state_dict(own)

    load(0.25)
    own = t.model.state_dict()
    weight = next(value for name, value in own.items() if name.endswith("weight"))
    weight.mul_(0.5)
    numbers += [float(v.sum()) for v in t.model.state_dict().values()]
    weight.add_(0.1)
    numbers += t.train()
    return numbers


@row(WEIGHTS, "`model.load_state_dict(earlier)` in the middle of training")
def load_earlier(t: Trial) -> Numbers:
    earlier = {name: value.clone() for name, value in t.model.state_dict().items()}
    logged = t.train(3)
    t.model.load_state_dict(earlier)
    return [*logged, *t.train(3)]


@row(WEIGHTS, "`model.to('cpu')`, `model.float()`, `model.requires_grad_()`, `model.train()`")
def no_changes(t: Trial) -> Numbers:
    t.model.to(ON).float().requires_grad_().train()
    t.model.to(memory_format=torch.channels_last)
    return t.train()


@row(WEIGHTS, "`model.bfloat16()` after `initialize`")
def to_bfloat16(t: Trial) -> Numbers:
    t.model.bfloat16()
    return []


@row(WEIGHTS, "SGD by hand: `p -= 0.1 * p.grad` under `no_grad`; `model.zero_grad()`")
def sgd_by_hand(t: Trial) -> Numbers:
    @torch.no_grad()
    def step() -> None:
        for p in t.params:
            p -= 0.1 * p.grad  # type: ignore[operator]

    return t.train(step=step, zero=lambda: t.model.zero_grad())


@row(WEIGHTS, "SAM: climb by `p.add_(e)`, a second pass, `p.sub_(e)`, step")
def sam(t: Trial) -> Numbers:
    logged = []
    for x, y in t.data():
        t.loss(x, y).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(2) for p in t.params]))  # type: ignore[union-attr]
            climbs = [p.grad * (0.05 / (norm + 1e-12)) for p in t.params]
            for p, climb in zip(t.params, climbs, strict=True):
                p.add_(climb)
        t.model.zero_grad()
        loss = t.loss(x, y)
        loss.backward()
        with torch.no_grad():
            for p, climb in zip(t.params, climbs, strict=True):
                p.sub_(climb)
        t.optimizer.step()
        t.optimizer.zero_grad()
        logged.append(loss.item())
    return logged


class Tied(nn.Module):
    """An embedding whose weight is the head's, and is read in `F.linear` as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(OUT, WIDTH)
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, OUT, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed((x[:, 0] * 3).long().clamp(0, OUT - 1)) + x
        for layer in self.body:
            h = layer(h).tanh()
        y: Tensor = self.head(h) + F.linear(h, self.embed.weight) * 0.1
        return y


add(WEIGHTS, "weight tying: `head.weight = embed.weight`, `F.linear(h, embed.weight)`", "tied",
    lambda t: t.train(clip=lambda: clip_grad_norm_(t.params, 0.05)), build=Tied)  # fmt: skip


def parametrized(kind: Callable[[nn.Module], nn.Module]) -> Build:
    def build() -> nn.Module:
        layers = [kind(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, OUT))

    return build


add(WEIGHTS, "`parametrizations.weight_norm(layer)`", "weight_norm",
    lambda t: t.train(), build=parametrized(nn.utils.parametrizations.weight_norm))  # fmt: skip


# -------------------------------------------------------------------------------------- hooks
HOOKS = "Hooks"


def halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def hook_before(t: Trial) -> None:
    for p in t.params[::2]:
        p.register_hook(halved)


add(HOOKS, "`p.register_hook(fn)` before `initialize`", "tensor_hook_before",
    lambda t: t.train(clip=lambda: clip_grad_norm_(t.params, 0.05)),
    prepare=hook_before)  # fmt: skip


@row(HOOKS, "`p.register_hook(fn)` after `initialize`, and removed again")
def tensor_hook_after(t: Trial) -> Numbers:
    hooks = [p.register_hook(halved) for p in t.params[::2]]
    logged = t.train(3, clip=lambda: clip_grad_norm_(t.params, 0.05))
    for hook in hooks:
        hook.remove()
    return [*logged, *t.train(3)]


@row(HOOKS, "`h.register_hook(fn)` and `h.retain_grad()` on what a layer returns")
def activation_hook(t: Trial) -> Numbers:
    logged = []
    for x, y in t.data():
        h = t.model[0](x)
        h.retain_grad()
        h.register_hook(lambda g: g * 0.5)
        loss = ((t.model[1:](h) - y) ** 2).mean()
        loss.backward()
        logged += [loss.item(), h.grad.norm().item()]
        t.optimizer.step()
        t.optimizer.zero_grad()
    return logged


SEEN: list[float] = []


def log_gradient(p: Tensor) -> None:
    assert p.grad is not None
    SEEN.append(p.grad.norm().item())


def post_hook_before(t: Trial) -> None:
    for p in t.params:
        p.register_post_accumulate_grad_hook(log_gradient)


@row(HOOKS, "`p.register_post_accumulate_grad_hook(log the norm)` before `initialize`",
     prepare=post_hook_before)  # fmt: skip
def post_accumulate_before(t: Trial) -> Numbers:
    SEEN.clear()
    logged = t.train()
    return [*logged, *sorted(SEEN)]


@row(HOOKS, "a hook after accumulation that changes the gradient: `p.grad.mul_(0.5)`")
def post_accumulate_changes(t: Trial) -> Numbers:
    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for p in t.params:
        p.register_post_accumulate_grad_hook(halve)
    return t.train(clip=lambda: clip_grad_norm_(t.params, 0.05))


@row(HOOKS, "the optimizer's step in such a hook: `p -= 0.1 * p.grad; p.grad = None`")
def step_in_hook(t: Trial) -> Numbers:
    @torch.no_grad()
    def step(p: Tensor) -> None:
        p.sub_(0.1 * p.grad)  # type: ignore[operator]
        p.grad = None

    for p in t.params:
        p.register_post_accumulate_grad_hook(step)
    return t.train(step=lambda: None, zero=None)


@row(HOOKS, "module hooks: forward pre, forward, full backward pre, full backward")
def module_hooks(t: Trial) -> Numbers:
    seen: list[float] = []
    hooks = []
    for layer in [t.model, *t.model]:
        hooks += [
            layer.register_forward_pre_hook(lambda m, a: (a[0] * 1.01,)),
            layer.register_forward_hook(lambda m, a, out: out + 0.01),
            layer.register_full_backward_pre_hook(lambda m, g: (g[0] * 0.9,)),
            layer.register_full_backward_hook(lambda m, i, o: seen.append(o[0].norm().item())),
        ]
    logged = t.train(3)
    for hook in hooks:
        hook.remove()
    return [*logged, *seen, *t.train(3)]


@row(HOOKS, "`optimizer.register_step_pre_hook`, `register_step_post_hook`")
def optimizer_hooks(t: Trial) -> Numbers:
    seen: list[float] = []
    t.optimizer.register_step_pre_hook(
        lambda o, a, k: seen.append(o.param_groups[0]["params"][0].grad.norm().item())
    )
    t.optimizer.register_step_post_hook(lambda o, a, k: seen.append(t.params[0].sum().item()))
    return [*t.train(), *seen]


# --------------------------------------------------------------------------------------- graphs
GRAPHS = "Graphs"


@at("backward", GRAPHS, "`loss.backward(retain_graph=True)`, then backward again")
def retain_graph(t: Trial, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@at("loss", GRAPHS,
    "double backward: `torch.autograd.grad(y.sum(), x, create_graph=True)` in the loss"
    )  # fmt: skip
def gradient_penalty(t: Trial, x: Tensor, y: Tensor) -> Tensor:
    out = t.model(x.requires_grad_())
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return ((out - y) ** 2).mean() + 0.1 * gradient.pow(2).sum()


@row(GRAPHS, "double backward by parameters: `torch.autograd.grad(loss, params, create_graph=True)`"
     )  # fmt: skip
def parameter_penalty(t: Trial) -> Numbers:
    def loss(x: Tensor, y: Tensor) -> Any:
        loss = t.loss(x, y)
        gradients = torch.autograd.grad(loss, t.params, create_graph=True)
        return loss + 0.1 * sum(g.pow(2).sum() for g in gradients)

    return t.train(loss=loss)


@row(GRAPHS, "`loss.backward(create_graph=True)`")
def create_graph(t: Trial) -> Numbers:
    t.loss(*t.data()[0]).backward(create_graph=True)
    return []


class Checkpointed(nn.Module):
    """Each block recomputed, in either form."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, OUT)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        y: Tensor = self.head(x)
        return y


add(GRAPHS, "`checkpoint(layer, x, use_reentrant=False)`", "checkpointed",
    lambda t: t.train(clip=lambda: clip_grad_norm_(t.params, 0.05)),
    build=lambda: Checkpointed(False))  # fmt: skip
add(GRAPHS, "`checkpoint(layer, x, use_reentrant=True)`", "checkpointed_reentrant",
    lambda t: t.train(clip=lambda: clip_grad_norm_(t.params, 0.05)),
    build=lambda: Checkpointed(True))  # fmt: skip


@row(GRAPHS, "`torch.func.functional_call(model, dict(model.named_parameters()), x)`, also with "
     "`p * 1.01` in place of `p`")  # fmt: skip
def functional_call(t: Trial) -> Numbers:
    number = count()

    def loss(x: Tensor, y: Tensor) -> Any:
        changed = next(number) % 2
        named = {n: p * 1.01 if changed else p for n, p in t.model.named_parameters()}
        return ((torch.func.functional_call(t.model, named, (x,)) - y) ** 2).mean()

    return t.train(loss=loss)


class Keeping(torch.autograd.Function):
    """Keeps its weight the wrong way, as people do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        ctx.w = w
        ctx.save_for_backward(x)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g @ ctx.w, g.t() @ x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Keeping.apply(x, layer.weight).tanh()
        y: Tensor = self.head(x)
        return y


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(OUT, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed((x[:, 0] * 3).long().clamp(0, OUT - 1)) + x)
        return y


@row(GRADIENTS, "`nn.Embedding(..., sparse=True)`, for a dense one with plain PyTorch's AdamW",
     build=Sparse)  # fmt: skip
def sparse_gradients(t: Trial) -> Numbers:
    t.model.embed.sparse = t.engine is not None
    return t.train(clip=lambda: clip_grad_norm_(t.params, 0.05))


add(GRAPHS, "an `autograd.Function` that keeps a weight as `ctx.w = w`", "custom_function",
    lambda t: t.train(), build=Custom)  # fmt: skip


@at("after", GRAPHS, "evaluation between steps: `model.eval()` under `no_grad`, `inference_mode`")
def evaluation(t: Trial) -> list[float]:
    t.model.eval()
    x, y = t.data()[0]
    with torch.no_grad():
        one = t.loss(x, y).item()
    with torch.inference_mode():
        two = t.loss(-x, y).item()
    t.model.train()
    return [one, two]


@row(GRAPHS, "a submodule called alone, `model[2](x)`, and a part of the model, `model[:2](x)`")
def submodules(t: Trial) -> Numbers:
    x = torch.ones(1, WIDTH, device=ON)
    return t.train(extra=lambda: 0.1 * (t.model[2](x) + t.model[1][0](x) + t.model[:2](x)).sum())


@row(GRAPHS, "`with torch.autograd.set_detect_anomaly(True):`")
def anomaly(t: Trial) -> Numbers:
    with torch.autograd.set_detect_anomaly(True):
        return t.train(3)


# -------------------------------------------------------------------------------- optimizers
OPTIMIZERS = "Optimizers"


@row(OPTIMIZERS, "`optimizer.param_groups[0]['lr'] = ...`, and a scheduler (`OneCycleLR`)")
def scheduler(t: Trial) -> Numbers:
    schedule = torch.optim.lr_scheduler.OneCycleLR(t.optimizer, 2e-2, total_steps=20)
    logged = t.train(4, after=lambda: (schedule.step(), schedule.get_last_lr()[0])[1])
    t.optimizer.param_groups[0]["lr"] = 5e-3
    t.optimizer.param_groups[0]["weight_decay"] = 0.0
    return [*logged, *t.train(2)]


def only_some(t: Trial) -> None:
    start = t.start

    def with_groups(model: Any) -> Any:
        groups = [
            {"params": [p for n, p in model.named_parameters() if p.dim() > 1], "lr": 5e-3},
            {"params": [p for n, p in model.named_parameters() if p.dim() == 1],
             "weight_decay": 0.0},
        ]  # fmt: skip
        return start(model, groups)  # type: ignore[call-arg]

    t.start = with_groups


add(OPTIMIZERS, "param groups: a learning rate for each layer, no weight decay for biases "
    "(`initialize(..., parameters=groups)`)", "param_groups", lambda t: t.train(),
    prepare=only_some)  # fmt: skip


def only_head(t: Trial) -> None:
    start = t.start
    t.start = lambda model: start(model, [{"params": list(model[-1].parameters())}])  # type: ignore[call-arg]


@row(OPTIMIZERS, "`optimizer.add_param_group({...})` later", prepare=only_head)
def add_param_group(t: Trial) -> Numbers:
    logged = t.train(3)
    t.optimizer.add_param_group({"params": list(t.model[0].parameters()), "lr": 1e-3})
    return [*logged, *t.train(3)]


add(OPTIMIZERS, "frozen before `initialize`: `p.requires_grad_(False)`", "frozen",
    lambda t: t.train(clip=lambda: [float(p.grad is None) for p in t.params]),
    prepare=frozen_part)  # fmt: skip


@row(OPTIMIZERS, "frozen after some steps, and unfrozen again")
def frozen_later(t: Trial) -> Numbers:
    logged = t.train(2)
    t.model[1].requires_grad_(False)
    logged += t.train(2)
    t.model[1].requires_grad_(True)
    return [*logged, *t.train(2)]


def each_in_turn(t: Trial, order: list[int], change: Callable[[], object]) -> Numbers:
    """Two steps for each of these blocks, the others frozen; `change` before each."""
    logged: Numbers = []
    for block in order:
        for number in range(4):
            t.model[number].requires_grad_(number == block)
        change()
        logged += t.train(2)
    return logged


@row(OPTIMIZERS, "LISA: another block trains every few steps, the others are frozen meanwhile")
def lisa(t: Trial) -> Numbers:
    return each_in_turn(t, [2, 0, 2, 1], lambda: None)


@row(OPTIMIZERS, "BAdam: as LISA, and `optimizer.state.clear()`, or `.state = defaultdict(dict)`")
def badam(t: Trial) -> Numbers:
    def change() -> None:
        t.optimizer.state.clear()
        t.optimizer.state = defaultdict(dict)

    return each_in_turn(t, [2, 0, 2, 1], change)


@row(OPTIMIZERS, "frozen before `initialize`, trained afterwards: `p.requires_grad_(True)`",
     prepare=frozen_part)  # fmt: skip
def unfrozen(t: Trial) -> Numbers:
    logged = t.train(2)
    t.model[1].requires_grad_(True)
    return [*logged, *t.train(2)]


@row(OPTIMIZERS, "`torch.optim.AdamW(model.parameters())`, `SGD`, or any other optimizer")
def foreign(t: Trial) -> Numbers:
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)
    return t.train()


@row(OPTIMIZERS, "`optimizer.step(closure)`")
def closure(t: Trial) -> Numbers:
    logged = []
    for x, y in t.data():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            t.optimizer.zero_grad()
            loss = t.loss(x, y)
            loss.backward()
            return loss

        logged.append(float(t.optimizer.step(closure)))
    return logged


@row(OPTIMIZERS, "`torch.save(optimizer.state_dict())`, trained on, loaded again")
def optimizer_state(t: Trial) -> Numbers:
    logged = t.train(2)
    file = io.BytesIO()
    torch.save([t.model.state_dict(), t.optimizer.state_dict()], file)
    t.train(2)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=True)
    t.model.load_state_dict(model)
    t.optimizer.load_state_dict(optimizer)
    return [*logged, *t.train(2)]


@row(OPTIMIZERS, "`optimizer.state[p]['exp_avg']`")
def moments(t: Trial) -> Numbers:
    return [*t.train(2), *(t.optimizer.state[p]["exp_avg"].norm() for p in t.params)]


# ------------------------------------------------------------------------------------- copies
COPIES = "Copies, processes, compilers"


@row(COPIES, "`copy.deepcopy(model)`")
def deepcopied(t: Trial) -> Numbers:
    copy.deepcopy(t.model)
    return []


@row(COPIES, "`copy.deepcopy(model.state_dict())`, `torch.save(model.state_dict())`")
def copied_state(t: Trial) -> Numbers:
    t.train(2)
    copied = copy.deepcopy(t.model.state_dict())
    file = io.BytesIO()
    torch.save(t.model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    return [each.sum().item() for each in [*copied.values(), *saved.values()]]


@row(COPIES, "`pickle.dumps(model)`")
def pickled(t: Trial) -> Numbers:
    pickle.dumps(t.model)
    return []


@row(COPIES, "`DataLoader(..., num_workers=1)`, forked while an update may be pending")
def data_loader(t: Trial) -> Numbers:
    x, y = (torch.stack(each).cpu() for each in zip(*t.data(), strict=True))
    logged = []
    for _ in range(2):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=None, num_workers=1):
            loss = t.loss(a.to(ON), b.to(ON))
            loss.backward()
            t.optimizer.step()
            t.optimizer.zero_grad()
            logged.append(loss.item())
    return logged


@row(COPIES, "two engines, of a generator and a discriminator, in one loop")
def two_engines(t: Trial) -> Numbers:
    judge = nn.Sequential(nn.Linear(OUT, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    critic = Trial(model=judge.to(ON), start=t.start)
    critic.begin()
    logged = []
    for x, y in t.data(4):
        fake = t.model(x)
        loss = critic.model(fake.detach()).pow(2).mean() + (critic.model(y) - 1).pow(2).mean()
        loss.backward()
        critic.optimizer.step()
        critic.optimizer.zero_grad()
        score = (critic.model(fake) - 1).pow(2).mean()
        score.backward()
        t.optimizer.step()
        t.optimizer.zero_grad()
        critic.optimizer.zero_grad()
        logged += [loss.item(), score.item()]
    return logged


def compiled(t: Trial, model: Any) -> Numbers:
    torch._dynamo.reset()
    return t.train(
        loss=lambda x, y: ((model(x) - y) ** 2).mean(),
        clip=lambda: clip_grad_norm_(t.params, 0.05),
    )


@row(COPIES, "`torch.compile(model)` (graphs end where parameters are fetched and released)")
def compiled_function(t: Trial) -> Numbers:
    return compiled(t, torch.compile(t.model, backend="aot_eager"))


def compile_blocks(t: Trial) -> None:
    for layer in t.model[:2]:
        layer.compile(backend="eager")


@row(COPIES, "blocks compiled before `initialize` and after it", prepare=compile_blocks)
def compiled_blocks(t: Trial) -> Numbers:
    t.model[2].compile(backend="eager")
    t.model[3][0] = torch.compile(t.model[3][0], backend="eager")
    logged = compiled(t, t.model)
    t.model[3][0] = t.model[3][0]._orig_mod
    return logged


def evaluated_in_a_thread(layer: nn.Module, x: Tensor) -> float:
    (outcome,) = in_thread(lambda: layer(x).sum().item(), name="evaluation")
    if isinstance(outcome, Exception):
        raise outcome
    return float(outcome)


@row(COPIES, "evaluation in another thread, during a forward")
def thread_amid_a_forward(t: Trial) -> Numbers:
    x, y = t.data(1)[0]
    logged: list[float] = []
    hook = t.model[1].register_forward_hook(
        lambda *_: None if logged else logged.append(evaluated_in_a_thread(t.model[0], x))
    )
    t.loss(x, y).backward()
    hook.remove()
    return logged


@row(GRAPHS, "`torch.func.grad` through `functional_call`")
def func_grad(t: Trial) -> Numbers:
    x, y = t.data(1)[0]

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        return ((torch.func.functional_call(t.model, params, (x,)) - y) ** 2).mean()

    gradients = torch.func.grad(loss_of)({n: p.detach() for n, p in t.model.named_parameters()})
    return [each.norm().item() for each in gradients.values()]


@row(OPTIMIZERS, "a head put into the model after `initialize`")
def added_later(t: Trial) -> Numbers:
    t.model.append(nn.Linear(OUT, OUT, device=ON))
    return t.train()


# ---------------------------------------------------------------------------------- cut short
CUT = "Cut short"


class Stop(Exception):
    """A user's."""


def cut_short(t: Trial, error: type[BaseException], where: str) -> Numbers:
    """The fourth step meets an error, is given up, and training goes on."""

    def stop(*_: Any) -> None:
        raise error

    logged = t.train(3)
    x, y = t.data()[4]
    hook: Any = None
    if where == "forward":
        hook = t.model[2].register_forward_hook(stop)
    elif where == "backward":
        hook = t.model[1].register_full_backward_hook(stop)
    elif where == "accumulated":
        hook = t.model[1][0].weight.register_post_accumulate_grad_hook(stop)

    def step() -> None:
        loss = t.loss(x, y)
        if where == "between":
            stop()
        loss.backward()

    with pytest.raises(error):
        step()
    if hook is not None:
        hook.remove()
    t.optimizer.zero_grad()
    if t.engine is not None:
        assert_at_rest(t.engine)
        t.engine.check_integrity()
    return [*logged, *t.train(3)]


PLACES = ("forward", "between", "backward", "accumulated")


def _add_cuts(error: type[BaseException], what: str) -> None:
    for where in PLACES:

        def loop(t: Trial, where: str = where) -> Numbers:
            return cut_short(t, error, where)

        loop.__name__ = f"{error.__name__.lower()}_in_{where}"
        words = {
            "forward": "a forward hook", "between": "between forward and backward",
            "backward": "a module's backward hook", "accumulated": "a post-accumulate hook",
        }[where]  # fmt: skip
        row(CUT, f"{what}: {words}; then `zero_grad()`, and on")(loop)


_add_cuts(Stop, "an exception")
_add_cuts(KeyboardInterrupt, "Ctrl-C")
