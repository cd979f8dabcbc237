"""loss.backward() of a user's own in fp16 gives the gradients of engine.backward(loss)."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload.deepspeed import utils
from offload.tiers.errors import StateError, UnsupportedError
from tests.deepspeed.loops import BASE, batch, initialized, model

FP16 = {
    **BASE, "gradient_accumulation_steps": 1, "fp16": {"enabled": True, "initial_scale_power": 9},
}  # fmt: skip


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        out = self.inner(x)
        return {"loss": nn.functional.mse_loss(out, y), "out": out}


class WithObject(WithLoss):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return SimpleNamespace(**super().forward(x, y))


def half(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(number, torch.float16)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [utils.safe_get_full_grad(param) for param in net.parameters()]


def tiny(net: nn.Module) -> nn.Module:
    """Gradients that are 0 in fp16 without a scale."""
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(1e-2)
    return net


@pytest.mark.parametrize(("steps", "through_module"), [(1, False), (1, True), (3, False)])
def test_a_loss_scales_itself(steps: int, through_module: bool) -> None:
    scale = {"enabled": True, "initial_scale_power": 14}  # of small losses
    config = {**FP16, "gradient_accumulation_steps": steps, "fp16": scale}
    found = []
    for by_hand in False, True:
        with initialized(WithLoss(tiny(model())), config) as engine:
            called = engine.module if through_module else engine
            for number in range(steps):
                loss = called(*half(number))["loss"] * 1e-3
                loss.backward() if by_hand else engine.backward(loss)
                got = gradients(engine.module)
                engine.step()
            assert engine.was_step_applied()
            found.append(got)
    for by_engine, by_hand in zip(*found, strict=True):
        # the division by the passes rounds at another place of the graph
        most = 0.0 if steps == 1 else 1e-2 * by_engine.norm()
        assert (by_engine - by_hand).norm() <= most
        assert by_engine.any()


def test_a_loss_in_an_object_scales_itself() -> None:
    with initialized(WithObject(tiny(model())), FP16) as engine:
        engine(*half(0)).loss.backward()
        found = gradients(engine.module)
    with initialized(WithLoss(tiny(model())), FP16) as engine:
        engine.backward(engine(*half(0))["loss"])
        assert all(map(torch.equal, found, gradients(engine.module)))


def test_what_is_added_to_a_loss_is_scaled_too() -> None:
    found = []
    for by_hand in False, True:
        with initialized(WithLoss(model()), FP16) as engine:
            loss = engine(*half(0))["loss"]
            loss = loss + engine.module.inner[0].weight.float().square().sum().half()
            loss.backward() if by_hand else engine.backward(loss)
            found.append(gradients(engine.module))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_several_engines_share_a_loss() -> None:
    nets = [WithLoss(model(seed)) for seed in (1, 2)]
    alone = []
    for net in nets:
        with initialized(copy.deepcopy(net), FP16) as engine:
            engine.backward(engine(*half(0))["loss"] / 2)
            alone.extend(gradients(engine.module))
    with initialized(nets[0], FP16) as first, initialized(nets[1], FP16) as second:
        for number, engines in enumerate([(first, second), (first.module, second.module)]):
            sum(called(*half(0))["loss"] / 2 for called in engines).backward()
            if number == 0:
                both = [*gradients(nets[0]), *gradients(nets[1])]
                assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))
            first.step()
            second.step()
        assert first.global_steps == second.global_steps == 2
        assert first.skipped_steps == second.skipped_steps == 0


def test_a_model_of_a_closed_engine_scales_nothing() -> None:
    net = WithLoss(model())
    with initialized(net, FP16) as engine:
        loss = engine(*half(0))["loss"]
        assert type(loss) is not torch.Tensor
    assert not net._forward_hooks


def test_scaled_once() -> None:
    found = []
    with initialized(WithLoss(model()), FP16) as engine:
        for backward in (
            lambda loss: loss.backward(),
            lambda loss: engine.scale(loss).backward(),
            engine.offload.backward,
            lambda loss: engine.offload.scale(loss).backward(),
        ):
            backward(engine(*half(0))["loss"])
            found.append(gradients(engine.module))
            engine.zero_grad()
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))


def test_gradients_that_would_come_scaled_are_refused() -> None:
    other = torch.ones((), requires_grad=True)
    with initialized(WithLoss(model()), FP16) as engine:
        with pytest.raises(UnsupportedError, match="no fp16 engine trains"):
            (engine(*half(0))["loss"] * other).backward()
        assert other.grad is None
        with pytest.raises(StateError, match=r"call engine.backward\(loss\)"):
            nn.functional.mse_loss(engine(*half(0))["out"], half(0)[1]).backward()
        loss = engine(*half(0))["loss"]
        assert type(loss.detach()) is type(loss > 0) is torch.Tensor
        assert f"{loss:.3f}" == f"{loss.item():.3f}"
        seen = []
        loss.register_hook(seen.append)
        loss.backward()
        assert [float(each) for each in seen] == [engine.loss_scale()]


def test_engines_with_different_scales_do_not_share_a_loss() -> None:
    more = {**FP16, "fp16": {"enabled": True, "initial_scale_power": 4}}
    nets = WithLoss(model()), WithLoss(model())
    with (
        initialized(nets[0], FP16) as first,
        initialized(nets[1], more) as second,
        pytest.raises(StateError, match=r"different loss scales, \[16.0, 512.0\]"),
    ):
        (first(*half(0))["loss"] + second(*half(0))["loss"]).backward()


def test_a_loss_that_is_scaled_already_is_not_scaled_again() -> None:
    with initialized(WithLoss(model()), FP16) as engine:
        with pytest.raises(StateError, match="twice"):
            engine.backward(engine.scale(engine(*half(0))["loss"]))
        engine.zero_grad()
        loss = engine.scale(engine(*half(0))["loss"]) + engine(*half(1))["loss"]
        with pytest.raises(StateError, match="twice"):
            loss.backward()
