"""A DeepSpeed loop, its import changed, trains what plain PyTorch trains."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import logging
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import offload.deepspeed as deepspeed
from offload.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from offload.deepspeed.ops.lion import FusedLion
from offload.tiers.errors import (
    CheckpointError,
    ConfigError,
    OffloadError,
    StateError,
    UnsupportedError,
)
from tests.deepspeed.loops import (
    ADAMW,
    BASE,
    BATCH,
    IN,
    OUT,
    Plain,
    batch,
    initialized,
    model,
    same,
    train,
    weights,
)
from tests.faults.faulty_calls import NEED_ROOM, FaultyCalls
from tests.offload.engine_cases import assert_scheduler_is_saved

mse = nn.functional.mse_loss
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.02}}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loop_is_plain_pytorchs(by_hand: bool, stage: int) -> None:
    net = model()
    plain = Plain(net, kind=WARMUP["type"], params=WARMUP["params"])
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    with initialized(net, {**BASE, "scheduler": WARMUP, "zero_optimization": zero}) as engine:
        assert train(engine, range(10), by_hand=by_hand) == pytest.approx(plain.train(range(10)))
        assert engine.get_global_grad_norm() == pytest.approx(plain.norms[-1])
        assert engine.get_lr() == [plain.optimizer.param_groups[0]["lr"]]
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 10, 18)
        assert same(weights(engine.module), weights(plain.model))


def test_nvme_changes_nothing(tmp_path: Path) -> None:
    def losses(zero: dict[str, Any]) -> list[float]:
        with initialized(model(), {**BASE, "zero_optimization": zero}) as engine:
            return train(engine, range(9))

    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    assert losses(zero) == losses({"stage": 3})


def test_the_boundary_gates_the_step() -> None:
    with initialized(model()) as engine:
        before = weights(engine.module)
        boundaries, applied = [], []
        for number in range(6):
            engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            applied.append(engine.was_step_applied())
            if number == 1:
                assert same(weights(engine.module), before)
        assert boundaries == applied == [False, False, True] * 2
        assert all(param.grad is None for param in engine.module.parameters())


def test_the_loop_may_say_where_the_boundary_is() -> None:
    net = model()
    plain = Plain(net)
    with initialized(net) as engine:
        for number in range(6):
            engine.set_gradient_accumulation_boundary(number % 3 == 2)
            engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
            if number % 3 == 2:
                engine.step()
        plain.train(range(6))
        assert same(weights(net), weights(plain.model))


def test_a_loop_that_owns_the_boundary() -> None:
    net = model()
    plain = Plain(net)
    with initialized(net, {**BASE, "managed_gradient_accumulation": False}) as engine:
        for number in range(6):
            engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
            if number % 3 == 2:
                engine.step()
        plain.train(range(6))
        assert same(weights(net), weights(plain.model))
        assert not engine.managed_gradient_accumulation()
        assert engine.global_samples == 6 * BATCH
        engine.backward(mse(engine(batch(0)[0]), batch(0)[1]))
        engine.step()
        assert engine.global_samples == 7 * BATCH  # of the passes that there were
        with pytest.raises(StateError, match="managed_gradient_accumulation"):
            engine.set_gradient_accumulation_boundary(True)


def test_the_returned_loss_is_divided_and_need_not_be() -> None:
    with initialized(model()) as engine:
        x, y = batch(0)
        loss = mse(engine(x), y)
        assert torch.equal(engine.backward(loss, retain_graph=True), loss / 3)
        divided = deepspeed.utils.safe_get_full_grad(engine.module[0].weight)
        engine.zero_grad()
        assert torch.equal(engine.backward(loss, scale_wrt_gas=False), loss)
        whole = deepspeed.utils.safe_get_full_grad(engine.module[0].weight)
        assert divided is not None
        assert whole is not None
        assert torch.allclose(divided * 3, whole)


class TwoOutputs(nn.Module):
    """The loss comes from the other output, as a transformers model's does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind, self.make = model(), kind, RETURNED[kind][0]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.net(x)
        return self.make(mse(out, y), out)


@dataclasses.dataclass
class Pair:
    loss: torch.Tensor
    out: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    loss: torch.Tensor
    out: torch.Tensor


class Named(NamedTuple):
    loss: torch.Tensor
    out: torch.Tensor


class Dict(dict[str, Any]):
    pass


class List(list[Any]):
    pass


class Tuple(tuple[Any, ...]):
    pass


class Itself:
    def __init__(self, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.inner, self.me = [Pair(loss, out)], self


def fields(found: Any) -> Any:
    return found.loss, found.out


# How an object is made of a loss and an output, and where they are in it.
RETURNED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda loss, out: (loss, out), lambda found: found),
    "dict": (
        lambda loss, out: {"loss": loss, "out": [out]},
        lambda found: (found["loss"], found["out"][0]),
    ),
    "namedtuple": (Named, fields),
    "dataclass": (Pair, fields),
    "frozen dataclass": (Slots, fields),
    "in a list": (
        lambda loss, out: [{"of": Slots(loss, out)}], lambda found: fields(found[0]["of"])
    ),
    "transformers": (
        lambda loss, out: CausalLMOutput(loss=loss, logits=out),
        lambda found: (found["loss"], found.logits),
    ),
    "dict of its own": (
        lambda loss, out: Dict(loss=loss, out=out), lambda found: (found["loss"], found["out"])
    ),
    "UserDict": (
        lambda loss, out: UserDict(loss=loss, out=out), lambda found: (found["loss"], found["out"])
    ),
    "list of its own": (lambda loss, out: List([loss, out]), lambda found: found),
    "tuple of its own": (lambda loss, out: Tuple([loss, out]), lambda found: found),
    "namespace": (lambda loss, out: SimpleNamespace(loss=loss, out=out), fields),
    "itself": (Itself, lambda found: fields(found.inner[0])),
    "distribution": (
        lambda loss, out: (loss, torch.distributions.Normal(out, 1.0)),
        lambda found: (found[0], found[1].mean),
    ),
    "function": (lambda loss, out: lambda: (loss, out), lambda found: found()),
}  # fmt: skip


def gradient_by_hand(engine: Any, kind: str, *, use: str) -> torch.Tensor:
    x, y = batch(0)
    outputs = engine(x, y)
    assert type(outputs) is type(RETURNED[kind][0](x.sum(), x))
    loss, out = RETURNED[kind][1](outputs)
    {"loss": loss, "both": loss + out.sum(), "out": mse(out, y)}[use].backward()
    found = deepspeed.utils.safe_get_full_grad(engine.module.net[0].weight)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", [kind for kind in RETURNED if kind != "function"])
def test_each_way_to_the_model_is_divided_once(kind: str) -> None:
    """By 4, a power of 2: with the bits of plain PyTorch."""
    with initialized(TwoOutputs(kind), {**BASE, "gradient_accumulation_steps": 4}) as engine:
        for use in ("loss", "both", "out"):
            found = gradient_by_hand(engine, kind, use=use)
            engine.zero_grad()
            plain = TwoOutputs("tuple")
            loss, out = plain(*batch(0))
            whole = {"loss": loss, "both": loss + out.sum(), "out": mse(out, batch(0)[1])}[use]
            (whole / 4).backward()
            assert torch.equal(found, plain.net[0].weight.grad)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.Linear(IN, IN)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        state = SimpleNamespace(h=torch.tanh(self.cell(x) + state.h))
        return state.h.sum(), state


def test_an_output_that_is_an_input_is_divided_once_or_refused() -> None:
    def loss_of(net: Any) -> torch.Tensor:
        x = batch(0)[0]
        _, state = net(x, SimpleNamespace(h=torch.zeros(())))
        found: torch.Tensor = net(x, state)[0]
        return found

    plain = Recurrent()
    (loss_of(plain) / 3).backward()
    with initialized(Recurrent()) as engine:
        with pytest.raises(StateError, match=r"once more at each; call engine\.backward"):
            loss_of(engine).backward()
        engine.zero_grad()
        engine.backward(loss_of(engine))
        found = deepspeed.utils.safe_get_full_grad(engine.module.cell.weight)
        assert torch.equal(found, plain.cell.weight.grad)


def test_gradients_that_are_asked_for_are_not_divided() -> None:
    def gradients(steps: int) -> list[torch.Tensor]:
        with initialized(model(), {**BASE, "gradient_accumulation_steps": steps}) as engine:
            x = batch(0)[0].requires_grad_()
            out = engine(x)
            (of_input,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (of_weight,) = torch.autograd.grad(
                out.sum(), engine.module[0].weight, retain_graph=True
            )
            engine.backward(of_input.pow(2).sum())
            penalty = deepspeed.utils.safe_get_full_grad(engine.module[0].weight)
            assert penalty is not None
            return [of_input.detach(), of_weight, penalty * steps]

    assert all(map(torch.allclose, gradients(3), gradients(1)))


def test_an_output_may_be_changed_in_place() -> None:
    def gradient(steps: int) -> torch.Tensor:
        with initialized(model(), {**BASE, "gradient_accumulation_steps": steps}) as engine:
            engine(batch(0)[0]).mul_(2.0).sum().backward()
            found = deepspeed.utils.safe_get_full_grad(engine.module[0].weight)
            assert found is not None
            return found

    assert torch.allclose(gradient(3) * 3, gradient(1))


def test_outputs_that_cannot_be_watched_are_refused_where_nothing_divides_them() -> None:
    with initialized(TwoOutputs("function")) as engine:
        engine.backward(engine(*batch(0))()[0])
        engine.step()
        engine(*batch(1))()[0].backward()
        with pytest.raises(StateError, match=r"not divided .* the function that .* looked into"):
            engine.step()


def test_the_batch_can_be_changed() -> None:
    with initialized(model()) as engine:
        assert engine.get_batch_info() == (6, 2, 3)
        engine.set_train_batch_size(4)
        assert engine.gradient_accumulation_steps() == 2
        train(engine, range(4))
        assert engine.global_steps == 2
        with pytest.raises(ValueError, match="no multiple"):
            engine.set_train_batch_size(5)
        engine.set_train_micro_batch_size(5)
        assert engine.train_batch_size() == 10


# ---------------------------------------------------------------- fp16 and bf16
FP16 = {
    **BASE, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    "gradient_accumulation_steps": 2,
}  # fmt: skip


def half_gradients(way: str) -> torch.Tensor:
    with initialized(model(), FP16) as engine:
        for number in range(2):
            x, y = batch(number, torch.float16)
            loss = mse(engine(x).float(), y.float())
            if way == "engine":
                engine.backward(loss)
            elif way == "scale":
                engine.scale(loss).backward()
            else:
                loss.backward()
        found = deepspeed.utils.safe_get_full_grad(engine.module[0].weight)
        assert found is not None
        engine.step()
        engine.step()
        assert engine.was_step_applied()
        return found


def test_fp16_by_a_scaled_loss_is_that_of_the_engines_backward() -> None:
    assert torch.allclose(half_gradients("engine"), half_gradients("scale"), rtol=2e-3)
    assert half_gradients("engine").abs().max() < 10  # not multiplied with the scale


def test_fp16_without_a_scale_is_refused_also_after_one_with_it() -> None:
    with pytest.raises(StateError, match=r"engine\.scale\(loss\)"):
        half_gradients("by hand")
    with initialized(model(), FP16) as engine:
        x, y = batch(0, torch.float16)
        engine.scale(mse(engine(x).float(), y.float())).backward()
        with pytest.raises(StateError, match="fp16 scales the loss"):
            mse(engine(x).float(), y.float()).backward()


def test_a_scaled_backward_that_fails_leaves_nothing_scaled() -> None:
    with initialized(model(), FP16) as engine:
        x, y = batch(0, torch.float16)
        out = engine(x)
        out.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.scale(mse(out.float(), y.float())).backward()
        with pytest.raises(StateError, match="fp16 scales the loss"):
            mse(engine(x).float(), y.float()).backward()


def test_an_overflow_skips_step_and_scheduler() -> None:
    with initialized(
        model(), {**FP16, "gradient_accumulation_steps": 1, "scheduler": WARMUP}
    ) as engine:
        x, y = batch(0, torch.float16)
        before = weights(engine.module)
        engine.backward(mse(engine(x).float(), y.float()) * 1e8)
        engine.step()
        assert not engine.was_step_applied()
        assert (engine.global_steps, engine.skipped_steps) == (1, 1)
        assert engine.lr_scheduler.last_epoch == 0
        assert engine.loss_scale() == 128.0
        assert same(weights(engine.module), before)


def test_inputs_are_cast_where_the_configuration_says_so() -> None:
    fp16 = {**FP16["fp16"], "auto_cast": True}
    with initialized(model(), {**FP16, "fp16": fp16}) as engine:
        assert engine(batch(0)[0]).dtype is torch.float16


def test_autocast_around_the_forward() -> None:
    autocast = {"enabled": True, "dtype": "bfloat16"}
    with initialized(model(), {**BASE, "torch_autocast": autocast}) as engine:
        assert engine(batch(0)[0]).dtype is torch.bfloat16
        assert engine.module[0].weight.dtype is torch.float32


def test_bf16_has_masters() -> None:
    with initialized(model(), {**BASE, "bf16": {"enabled": True}}) as engine:
        param = engine.module[0].weight
        for number in range(3):
            x, y = batch(number, torch.bfloat16)
            engine.backward(mse(engine(x).float(), y.float()))
            engine.step()
        master = deepspeed.utils.safe_get_full_fp32_param(param)
        assert master is not None
        assert master.dtype is torch.float32
        assert torch.equal(master.bfloat16(), param.detach().bfloat16())
        assert not torch.equal(master, param.detach().float())


# ---------------------------------------------------------------- optimizers and schedulers
def test_a_client_optimizer_with_groups_and_a_scheduler_of_it() -> None:
    def groups(net: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": [net[0].weight, net[2].weight], "weight_decay": 0.3},
            {"params": [net[0].bias, net[2].bias], "lr": 0.05, "name": "biases"},
        ]

    net, plain = model(), model()
    ours = torch.optim.AdamW(groups(net), lr=0.02, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.5)
    theirs = torch.optim.AdamW(groups(plain), lr=0.02, betas=(0.8, 0.9))
    other = torch.optim.lr_scheduler.StepLR(theirs, 1, gamma=0.5)
    config = {key: BASE[key] for key in ("train_micro_batch_size_per_gpu", "gradient_clipping")}
    with initialized(net, config, optimizer=ours, lr_scheduler=schedule) as engine:
        for number in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
                engine.step()
            mse(plain(batch(number)[0]), batch(number)[1]).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            theirs.step()
            theirs.zero_grad()
            other.step()
            assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        assert engine.get_lr() == [group["lr"] for group in theirs.param_groups]
        assert same(weights(net), weights(plain))
        with pytest.raises(UnsupportedError, match=r"AdamW\.step\(\)"):
            ours.step()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "adam"),
        (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), "adamw"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, fused=False), "adamw"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), "sgd"),
        (torch.optim.Adagrad, "adagrad"),
        (FusedAdam, "adamw"),
        (lambda p: DeepSpeedCPUAdam(p, adamw_mode=False), "adam"),
        (FusedLion, "lion"),
    ],
)
def test_client_optimizers_train_as_they_would(make: Any, kind: str) -> None:
    net, plain = model(), model()
    optimizer = None if make is FusedLion else make(plain.parameters())
    config = {"train_batch_size": BATCH, "gradient_clipping": 0}
    with initialized(net, config, optimizer=make) as engine:
        assert engine.optimizer_name() == kind
        for number in range(3):
            engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
            engine.step()
            if optimizer is not None:
                optimizer.zero_grad()
                mse(plain(batch(number)[0]), batch(number)[1]).backward()
                optimizer.step()
        assert optimizer is None or same(weights(net), weights(plain))


def test_a_client_optimizer_goes_on_where_it_was() -> None:
    net, plain = model(), model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (net, plain)]
    for each, optimizer in zip((net, plain), optimizers, strict=True):
        mse(each(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = {"train_batch_size": BATCH, "gradient_clipping": 0}
    with initialized(net, config, optimizer=optimizers[0]) as engine:
        engine.backward(mse(engine(batch(1)[0]), batch(1)[1]))
        engine.step()
        mse(plain(batch(1)[0]), batch(1)[1]).backward()
        optimizers[1].step()
        assert same(weights(net), weights(plain))


@pytest.mark.parametrize(
    "make", [torch.optim.RMSprop, torch.optim.Adamax,
             lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1)]
)  # fmt: skip
def test_a_client_optimizer_without_a_rule_is_refused(make: Any) -> None:
    net = model()
    with pytest.raises(UnsupportedError, match=r"no rule here|begins with zeros"):
        deepspeed.initialize(model=net, optimizer=make(net.parameters()), config={**BASE})


def test_a_subclass_of_a_known_optimizer_is_refused() -> None:
    class Own(torch.optim.AdamW):
        pass

    net = model()
    with pytest.raises(UnsupportedError, match="Own has no rule"):
        deepspeed.initialize(model=net, optimizer=Own(net.parameters()), config=BASE)


def test_without_an_optimizer_the_model_computes_and_does_not_train() -> None:
    config = {"train_batch_size": 2}
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model(), config=config)
    assert (optimizer, loader, scheduler) == (None, None, None)
    out = engine(batch(0)[0])
    with pytest.raises(StateError, match="no optimizer"):
        engine.backward(out.sum())
    with pytest.raises(StateError, match="no optimizer"):
        engine.step()
    assert not engine.module[0].weight.requires_grad  # no states are kept for it
    engine.destroy()


def test_parameters_in_no_group_are_frozen_and_their_norm_does_not_count(caplog: Any) -> None:
    net = model()
    with caplog.at_level(logging.WARNING, "offload"):
        engine, *_ = deepspeed.initialize(
            model=net, model_parameters=iter(net[2].parameters()), config=BASE
        )
    assert "2 trainable parameters are in no param group" in caplog.text
    before = net[0].weight.detach().clone()
    train(engine, range(3))
    assert torch.equal(net[0].weight, before)
    engine.destroy()


def test_a_scheduler_that_a_function_makes(tmp_path: Path) -> None:
    def make(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    with initialized(model(), lr_scheduler=make) as engine:
        train(engine, range(3))
        assert engine.get_lr() == pytest.approx([1e-3])
        engine.save_checkpoint(tmp_path)
        engine.save_16bit_model(tmp_path)
        assert_scheduler_is_saved(engine.offload)


# ---------------------------------------------------------------- accessors
def test_gradients_masters_and_states_are_read_and_set() -> None:
    utils = deepspeed.utils
    with initialized(model(), {**BASE, "gradient_accumulation_steps": 1}) as engine:
        param = engine.module[0].weight
        assert utils.safe_get_full_grad(param) is None
        with pytest.raises(StateError, match="there is no gradient"):
            utils.safe_set_full_grad(param, torch.zeros_like(param))
        engine.backward(mse(engine(batch(0)[0]), batch(0)[1]))
        utils.safe_set_full_grad(param, torch.ones(16, IN))
        gradient = utils.safe_get_full_grad(param)
        assert gradient is not None
        assert torch.equal(gradient, torch.ones(16, IN))
        utils.safe_update_full_grad_vectorized([param], lambda g, _: g * 2)
        engine.step()
        moment = utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert moment is not None
        assert moment.unique().numel() == 1  # all elements had the same gradient
        utils.safe_set_full_optimizer_state(param, torch.full((16, IN), 0.5), "exp_avg_sq")
        assert utils.safe_get_full_optimizer_state(param, "exp_avg_sq").eq(0.5).all()
        with pytest.raises(StateError, match="keeps exp_avg"):
            utils.safe_get_full_optimizer_state(param, "momentum")
        utils.safe_set_full_fp32_param(param, torch.full((16, IN), 0.25))
        assert param.eq(0.25).all()
        assert utils.safe_get_full_fp32_param(param).eq(0.25).all()
    assert utils.safe_get_full_fp32_param(param) is None
    with pytest.raises(StateError, match="no engine"):
        utils.safe_set_full_fp32_param(param, torch.zeros(16, IN))


def test_several_engines_in_one_process() -> None:
    nets = [model(1), model(2)]
    plains = [Plain(net) for net in nets]
    with initialized(nets[0]) as first, initialized(nets[1]) as second:
        for number in range(6):
            x, y = batch(number)
            loss = mse(first(x), y) + mse(second(x), y)
            loss.backward()
            first.step()
            second.step()
        for plain, net in zip(plains, nets, strict=True):
            plain.train(range(6))
            assert same(weights(net), weights(plain.model))


def test_one_engines_backward_divides_for_both() -> None:
    nets = [model(1), model(2)]
    plains = [Plain(net) for net in nets]
    with initialized(nets[0]) as first, initialized(nets[1]) as second:
        for number in range(3):
            x, y = batch(number)
            first.backward(mse(first(x), y) + mse(second(x), y))
            first.step()
            second.step()
        for plain, net in zip(plains, nets, strict=True):
            plain.train(range(3))
            assert same(weights(net), weights(plain.model))


# ---------------------------------------------------------------- zero
def test_a_model_made_under_zero_init() -> None:
    with deepspeed.zero.Init(config_dict_or_path=BASE):
        net = model()
    assert all(param.is_meta for param in net.parameters())
    with initialized(net) as engine:
        assert not any(param.is_meta for param in net.parameters())
        assert net[0].weight.std() > 0.01
        losses = train(engine, range(30))
        assert losses[-1] < 10
    with deepspeed.zero.Init(enabled=False):
        assert not model()[0].weight.is_meta


def test_initialize_may_be_called_under_zero_init() -> None:
    found = []
    for inside in False, True:
        with deepspeed.zero.Init(), deepspeed.zero.Init(enabled=inside):
            net = model()
            if inside:
                engine = deepspeed.initialize(model=net, config=BASE)[0]
            assert torch.empty(1).is_meta
        if not inside:
            engine = deepspeed.initialize(model=net, config=BASE)[0]
        found.append(train(engine, range(6)))
        engine.destroy()
        assert not torch.empty(1).is_meta
    assert found[0] == found[1]


def test_values_written_under_zero_init_are_not_lost_in_silence() -> None:
    values = model().state_dict()
    with deepspeed.zero.Init(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = model()
        net.load_state_dict(values)
    with pytest.raises(UnsupportedError, match="meta device"):
        deepspeed.initialize(model=net, config=BASE)
    with deepspeed.zero.Init():
        net = model()
        with (
            pytest.raises(UnsupportedError, match=r"before deepspeed\.initialize"),
            deepspeed.zero.GatheredParameters(net[0].weight, modifier_rank=0),
        ):
            net[0].weight.data.zero_()


def test_gathered_parameters() -> None:
    net = model()
    with deepspeed.zero.GatheredParameters(net[0].weight, modifier_rank=0):
        nn.init.ones_(net[0].weight)
    with initialized(net) as engine:
        with deepspeed.zero.GatheredParameters(net.parameters(), modifier_rank=0):
            assert net[0].weight.data.eq(1).all()
            net[0].weight.data.fill_(2)
        assert net[0].weight.eq(2).all()
        with deepspeed.zero.GatheredParameters([net[0].weight], enabled=False):
            pass
        deepspeed.zero.register_external_parameter(net[2], net[0].weight)
        with deepspeed.zero.unwrap_model_for_generation(engine) as inner:
            assert inner is net


# ---------------------------------------------------------------- checkpoints
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    config = {**BASE, "scheduler": WARMUP}
    with initialized(model(), config) as engine:
        train(engine, range(6))
        state = {"epoch": 2, "rng": torch.get_rng_state(), "pair": (1, {3: "x"})}
        with pytest.raises(ValueError, match="name a folder"):
            engine.save_checkpoint("")
        assert engine.save_checkpoint(tmp_path, client_state=state)
        expected = train(engine, range(6, 12))
        rate = engine.get_lr()
    assert (tmp_path / "latest").read_text() == "global_step2"
    with initialized(model(7), config) as engine:
        path, client = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step2")
        assert client is not None
        assert torch.equal(client["rng"], state["rng"])
        assert (client["epoch"], client["pair"]) == (2, (1, {3: "x"}))
        assert engine.global_steps == 2
        assert train(engine, range(6, 12)) == expected
        assert engine.get_lr() == rate


def test_weights_alone(tmp_path: Path) -> None:
    with initialized(model()) as engine:
        train(engine, range(3))
        engine.save_checkpoint(tmp_path, tag="x")
        kept = weights(engine.module)
    with initialized(model(7)) as engine:
        engine.load_checkpoint(tmp_path, "x", load_module_only=True)
        assert engine.global_steps == 0
        assert all(torch.equal(a, b) for a, b in zip(kept, weights(engine.module), strict=True))
        moment = deepspeed.utils.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg")
        assert moment.eq(0).all()
    with (
        initialized(nn.Sequential(nn.Linear(IN, OUT))) as engine,
        pytest.raises(CheckpointError, match=r"unexpected \['2"),
    ):
        engine.load_checkpoint(tmp_path, "x", load_module_only=True)


def test_the_weights_as_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with initialized(model()) as engine:
        for _ in range(2):
            engine.save_16bit_model(tmp_path, "pytorch_model.bin")
        found = load_file(tmp_path / "pytorch_model.safetensors")
        assert torch.equal(found["0.weight"], engine.module[0].weight)
        assert engine.offload.last_checkpoint is None
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.safetensors"]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with initialized(model()) as engine:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        with pytest.raises(CheckpointError, match="no such checkpoint"):
            engine.load_checkpoint(tmp_path, "none")
        with pytest.raises(UnsupportedError, match=r"client_state\['f'\] is a function"):
            engine.save_checkpoint(tmp_path, client_state={"f": train})
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs/mp_rank_00_model_states.pt").touch()
        with pytest.raises(CheckpointError, match="written by DeepSpeed"):
            engine.load_checkpoint(tmp_path, "theirs")
        engine.offload.save_checkpoint(tmp_path / "alone")
        with pytest.raises(CheckpointError, match="has no state of a loop"):
            engine.load_checkpoint(tmp_path, "alone")


def test_a_save_that_fails_keeps_what_the_tag_had(tmp_path: Path) -> None:
    """At any call of the system that it makes."""
    calls = FaultyCalls()
    with initialized(model()) as engine, calls.installed():

        def save(number: int) -> None:
            engine.save_checkpoint(tmp_path, tag="best", client_state={"number": number})

        save(1)
        save(1)
        operations = sorted(set(calls.seen) & NEED_ROOM)
        assert len(operations) > 4
        for operation in operations:
            calls.arm(operation, 0, "ENOSPC")
            with pytest.raises(OffloadError, match=str(tmp_path)):
                save(2)
            assert calls.hits == 1
            calls.release()
            for tag in (None, "best"):
                path, client = engine.load_checkpoint(tmp_path, tag)
                assert path == str(tmp_path / "best")
                assert client in ({"number": 1}, {"number": 2})
                assert client == {"number": 1} or operation in ("fsync folder", "rename")
            save(1)


# a tensor as older versions wrote it
ONES = {
    "is": "tensor", "dtype": "float32", "shape": [2],
    "of": base64.b64encode(b"\0\0\x80?" * 2).decode(),
}  # fmt: skip


def as_older_versions(folder: Path, engine: Any, **more: Any) -> None:
    """A tag `x`, with the loop's state beside it."""
    engine.offload.save_checkpoint(folder / "x")
    state = {
        "format": 1, "global_steps": 2, "global_samples": 12, "skipped_steps": 0,
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else {},
        "client_state": {"pair": {"is": "tuple", "of": [1, ONES]}}, **more,
    }  # fmt: skip
    (folder / "x.json").write_text(json.dumps(state))
    (folder / "latest").write_text("x")


def test_what_an_older_version_saved(tmp_path: Path) -> None:
    config = {**BASE, "scheduler": WARMUP}
    with initialized(model(), config) as engine:
        train(engine, range(6))
        as_older_versions(tmp_path, engine)
        expected = train(engine, range(6, 12))
    with initialized(model(7), config) as engine:
        _, client = engine.load_checkpoint(tmp_path)
        assert client is not None
        assert (client["pair"][0], client["pair"][1].tolist()) == (1, [1.0, 1.0])
        assert (engine.global_steps, engine.global_samples) == (2, 12)
        assert train(engine, range(6, 12)) == expected
        beside = (tmp_path / "x.json").read_bytes()
        engine.save_checkpoint(tmp_path, "x", client_state={"newer": True})
        assert engine.load_checkpoint(tmp_path)[1] == {"newer": True}
        assert (tmp_path / "x.json").read_bytes() == beside  # it may be the user's own


@pytest.mark.parametrize(
    "more",
    [{"format": 2}, {"client_state": []}, {"global_steps": "many"}, {"client_state": {"is": "?"}}],
)
def test_what_an_older_version_saved_and_is_damaged(more: dict[str, Any], tmp_path: Path) -> None:
    with initialized(model()) as engine:
        as_older_versions(tmp_path, engine, **more)
        before = weights(engine.module)
        with pytest.raises(CheckpointError, match=r"x\.json"):
            engine.load_checkpoint(tmp_path, "x")
        (tmp_path / "x.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"x\.json is damaged"):
            engine.load_checkpoint(tmp_path, "x")
        assert same(weights(engine.module), before)


# ---------------------------------------------------------------- the rest
def test_a_loader_of_the_training_data() -> None:
    data = [(torch.full((IN,), float(i)), torch.zeros(OUT)) for i in range(7)]
    config = {**BASE, "dataloader_drop_last": True}
    engine, _, loader, _ = deepspeed.initialize(model=model(), config=config, training_data=data)
    assert loader is engine.training_dataloader
    assert [len(x) for x, _ in loader] == [2, 2, 2]
    many = deepspeed.utils.RepeatingLoader(loader)
    assert len([next(many) for _ in range(5)]) == 5
    engine.destroy()


def test_the_configuration_comes_from_a_file_or_arguments(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(BASE))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    engine, *_ = deepspeed.initialize(args=args, model=model())
    assert engine.train_batch_size() == 6
    engine.destroy()
    with pytest.raises(ConfigError, match="2 are given"):
        deepspeed.initialize(args=args, model=model(), config=BASE)
    with pytest.raises(ConfigError, match="0 are given"):
        deepspeed.initialize(model=model())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "Trainer only"),
        ({"train_micro_batch_size_per_gpu": None}, "train_batch_size: missing"),
        ({"zero_optimisation": {}}, "did you mean"),
        ({"optimizer": {"type": "Lamb"}}, "no rule here"),
        ({"offload": {"budgets": {}}}, "budgets: unknown key"),
        ({"offload": 3}, "expected keys and values"),
        ({"offload": {"optimizer": {"in_backward": True}}}, "in_backward"),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "stage 3"),
    ],
)
def test_a_configuration_is_refused_before_anything_is_made(
    change: dict[str, Any], words: str
) -> None:
    net = model()
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        deepspeed.initialize(model=net, config={**BASE, **change})
    assert all(param.requires_grad for param in net.parameters())


def test_keys_of_ours_are_laid_over() -> None:
    own = {"budget": {"host": "64MiB"}, "optimizer": {"states": "bf16"}, "seed": 3}
    with initialized(model(), {**BASE, "offload": own}) as engine:
        assert engine.offload.config.optimizer.states.uniform
        assert str(engine.offload.config.optimizer.states) == "bf16"
        assert engine.offload.config.optimizer.lr == ADAMW["params"]["lr"]  # type: ignore[index]


def test_attributes_of_the_model_and_hints_for_those_that_are_not_there() -> None:
    net = TwoOutputs("tuple")
    with initialized(net) as engine:
        assert engine.kind == "tuple"
        assert engine.module is net
        assert not engine.eval().training
        assert engine.zero_optimization_stage() == 2
        with pytest.raises(AttributeError, match="gradients are reduced in backward"):
            engine.allreduce_gradients()
        assert engine.sparse_tensor_module_names == set()
        with pytest.raises(AttributeError, match="'nonsense'"):
            _ = engine.nonsense
        engine.reload_states()
        with pytest.raises(UnsupportedError, match="offload_optimizer"):
            engine.offload_states()
    with pytest.raises(AttributeError, match="the model itself"):
        _ = deepspeed.init_inference
    with pytest.raises(AttributeError, match=r"deepspeed\.utils has no 'groups'"):
        _ = deepspeed.utils.groups


def test_no_sync() -> None:
    net = model()
    plain = Plain(net)
    with initialized(net) as engine:
        for number in range(3):
            with engine.no_sync():
                engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
                with pytest.raises(StateError, match="inside no_sync"):
                    engine.step()
                with pytest.raises(StateError, match="inside no_sync"), engine.no_sync():
                    pass
            engine.step()
        plain.train(range(3))
        assert same(weights(net), weights(plain.model))


def test_coalesced_reduction_is_one_step() -> None:
    net = model()
    plain = Plain(net)
    with initialized(net, {**BASE, "zero_optimization": {"stage": 3}}) as engine:
        with engine.coalesce_grad_reduction():
            for number in range(3):
                engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
            with pytest.raises(StateError, match="inside no_sync"):
                engine.step()
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        plain.train(range(3))
        assert same(weights(net), weights(plain.model))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = model(), nn.Dropout(0.5)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.net[1](self.net[0](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[2](deepspeed.checkpointing.checkpoint(self.block, x))


def test_activation_checkpointing_has_the_same_gradients() -> None:
    deepspeed.checkpointing.configure(None, deepspeed_config=BASE)
    assert deepspeed.checkpointing.is_configured()

    def gradient(kind: type[nn.Module]) -> torch.Tensor:
        with initialized(kind()) as engine:
            torch.manual_seed(5)
            engine.backward(mse(engine(batch(0)[0]), batch(0)[1]))
            found = deepspeed.utils.safe_get_full_grad(engine.module.net[0].weight)
            assert found is not None
            return found

    class Kept(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net[2](self.block(x))

    assert torch.equal(gradient(Checkpointed), gradient(Kept))


def test_a_process_alone_has_a_process_group() -> None:
    import torch.distributed as dist

    deepspeed.init_distributed()
    try:
        assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (0, 1)
        deepspeed.comm.barrier()
        deepspeed.init_distributed()  # again: of no effect
        with initialized(model()) as engine:
            assert engine.world_size == 1
            train(engine, range(3))
        deepspeed.log_dist("said", ranks=[0])
    finally:
        dist.destroy_process_group()
    with pytest.raises(AttributeError, match=r"offload\.deepspeed\.comm has no"):
        _ = deepspeed.comm.nonsense


def test_the_accelerator() -> None:
    found = deepspeed.accelerator.get_accelerator()
    assert torch.device(found.current_device_name()).type == found.device_name()
    found.synchronize()
    with pytest.raises(AttributeError, match="has no 'nonsense'"):
        _ = found.nonsense


def test_a_backward_of_some_parameters_is_divided() -> None:
    def gradient(steps: int) -> torch.Tensor:
        with initialized(model(), {**BASE, "gradient_accumulation_steps": steps}) as engine:
            weight = engine.module[2].weight
            mse(engine(batch(0)[0]), batch(0)[1]).backward(inputs=[weight])
            found = deepspeed.utils.safe_get_full_grad(weight)
            assert found is not None
            return found

    assert torch.allclose(gradient(3) * 3, gradient(1))


@pytest.mark.parametrize(
    "form",
    [
        lambda net: net,
        lambda net: list(net.named_parameters()),
        lambda net: [
            {"params": net[0].weight},
            {"params": [net[0].bias]},
            {"params": []},
            {"params": iter(net[2].parameters()), "lr": 0.5},
        ],
    ],
)
def test_parameters_come_in_every_form_that_torch_takes(form: Any) -> None:
    net = model()
    with initialized(net, model_parameters=form(net)) as engine:
        assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == 4
        assert all(param.requires_grad for param in net.parameters())


def test_our_keys_do_not_contradict_a_clients_optimizer() -> None:
    net = model()
    own = {"offload": {"optimizer": {"lr": 0.1}}}
    with pytest.raises(ConfigError, match=r"offload\.optimizer\.lr"):
        deepspeed.initialize(
            model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), config={**BASE, **own}
        )
