"""Memory that is released between two passes comes back with the same bits, and nothing reads or
loses it meanwhile; weights are streamed one after the other."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload.errors import BudgetError, ConfigError, OffloadError, StateError, TierFullError
from offload.process.machine import rss_nbytes, trim_memory
from offload.swap.io.block_store import BlockStore
from offload.tiers.memory import HostMemory
from offload.tiers.tier import Tier
from tests.offload.engine_cases import (
    DEVICE,
    HOST,
    NVME,
    TinyLM,
    batches,
    config,
    on_the_cpu_alone,
    plan_for_a_gpu,
    saved_step,
    seeded,
)
from tests.offload.engine_states import (
    assert_same_bits,
    bits,
    losses_of,
    parameters_of,
    states_of,
)  # fmt: skip
from tests.offload.storage_cases import adapted
from tests.ranks.processes import run_ranks

pytestmark = on_the_cpu_alone("tests/null_gpu has a device's")
HERE = {"parameters": "device", "gradients": "device", "optimizer": "device"}
PARTS = {"device": "40%", "host": "30%", "nvme": "30%"}
PLACEMENTS = [HOST, NVME, HERE, {"parameters": PARTS, "gradients": "host", "optimizer": PARTS}]
BUDGET = {"device": "16MiB", "host": "16MiB", "nvme": "64MiB"}


def engine_of(folder: Path, placement: Any = DEVICE, **keys: Any) -> offload.Engine:
    keys = {"budget": BUDGET, "optimizer": {"lr": 1e-2}, **keys}
    return offload.initialize(seeded(TinyLM), config(folder, placement, **keys))


def loss_of(engine: offload.Engine, number: int = 0) -> torch.Tensor:
    model: Any = engine.module
    loss: torch.Tensor = model.loss(batches(number + 1)[number])
    return loss


def run(folder: Path, seed: int, gpu: bool, *, sleeps: bool) -> list[Any]:
    """A drawn program: passes, steps, cleared gradients, saves, and releases anywhere between."""
    chance, out = random.Random(seed), []
    keys = {
        "precision": chance.choice(["fp32", "bf16"]), "clip_grad_norm": chance.choice([None, 0.5]),
        "optimizer": {"lr": 1e-2, "states": chance.choice(["fp32", "int8"])},
    }  # fmt: skip
    placement = chance.choice(PLACEMENTS)
    if gpu:  # without its kernels, no update is made there
        placement = {**NVME, "parameters": placement["parameters"]}
    with engine_of(folder, placement, **keys) as engine:
        for number in range(8):
            loss = loss_of(engine, number)
            engine.backward(loss)
            out.append(loss.item())
            del loss
            for act in chance.sample(["sleep", "step", "sleep all", "clear", "save", "look"], 4):
                if act.startswith("sleep") and sleeps:
                    with engine.asleep(host=act == "sleep all"):
                        engine.check_integrity()
                elif act == "step" and engine.has_unstepped_gradients():
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                elif act == "clear" and chance.random() < 0.2:
                    engine.optimizer.zero_grad()
                elif act == "save" and not engine.has_unstepped_gradients():
                    engine.save_checkpoint(folder / "saved", wait=False)
                elif act == "look":
                    gradients = [param.grad for param in engine.module.parameters()]
                    out += [each.norm().item() for each in gradients if each is not None]
        out.append({name: bits(value) for name, value in states_of(engine).items()})
        engine.check_integrity()
    return out


@pytest.fixture(params=[False, True])
def gpu(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        plan_for_a_gpu(monkeypatch)
    return bool(request.param)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_program_has_the_bits_of_one_that_never_sleeps(
    seed: int, gpu: bool, tmp_path: Path
) -> None:
    assert run(tmp_path, seed, gpu, sleeps=True) == run(tmp_path, seed, gpu, sleeps=False)


def test_no_tier_holds_memory_while_all_sleeps(gpu: bool, tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        losses_of(engine, batches(2))
        expected, tiers = states_of(engine), engine._tier_manager._memory
        engine.release_device()
        assert (tiers[Tier.DEVICE].touched_nbytes == 0) is gpu  # else RAM, and nvme is not planned
        engine.release_device(host=True)  # what is missing
        assert [tiers[tier].touched_nbytes for tier in (Tier.DEVICE, Tier.HOST)] == [0, 0]
        assert engine.report().tiers["host"].used_nbytes == 0
        for _ in range(2):
            engine.restore_device()
        assert_same_bits(states_of(engine), expected)
        assert engine.report().tiers["nvme"].used_nbytes == 0


def gradient_of(engine: offload.Engine) -> torch.Tensor:
    gradient = next(engine.module.parameters()).grad
    assert gradient is not None
    return gradient


CALLS: dict[str, Callable[[offload.Engine, Path], object]] = {
    "forward": lambda engine, _: loss_of(engine),
    "step": lambda engine, _: engine.optimizer.step(),
    "gathered": lambda engine, _: parameters_of(engine),
    "gradient": lambda engine, _: engine.gradient(next(engine.module.parameters())),
    "norm of .grad": lambda engine, _: gradient_of(engine).norm(),
    "write to .grad": lambda engine, _: gradient_of(engine).mul_(1.0),
    "read": lambda engine, _: next(engine.module.parameters()).sum(),
    "write": lambda engine, _: next(engine.module.parameters()).data.mul_(1.0),
    "state_dict": lambda engine, _: engine.module.state_dict(),
    "its state_dict": lambda engine, _: engine.optimizer.state_dict(),
    "load optimizer": lambda engine, folder: engine.optimizer.load_state_dict(
        torch.load(folder / "optimizer")
    ),
    "load": lambda engine, folder: engine.load_checkpoint(folder / "saved"),
    "weights": lambda engine, _: list(engine.named_weights()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_use_is_an_error_or_wakes_it(call: Any, tmp_path: Path) -> None:
    saved_step(tmp_path, config(tmp_path, HOST))
    ended = []
    for on_use in ("raise", "wake", None):
        with engine_of(tmp_path, HERE) as engine:
            losses_of(engine, batches(2))
            torch.save(engine.optimizer.state_dict(), tmp_path / "optimizer")
            engine.backward(loss_of(engine, 2))
            if on_use is not None:
                engine.release_device(host=True, on_use=on_use)  # type: ignore[arg-type]
            if on_use == "raise":
                with pytest.raises(StateError, match="asleep"):
                    call(engine, tmp_path)
                engine.restore_device()
            call(engine, tmp_path)
            assert not engine.is_asleep
            ended.append(states_of(engine))
    assert_same_bits(ended[0], ended[2])
    assert_same_bits(ended[1], ended[2])


def test_a_graph_from_before_is_refused_or_has_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.swap.activations.activations, "MIN_NBYTES", 1)
    with engine_of(tmp_path, {**NVME, "activations": {"tier": "nvme"}}) as engine:
        loss = loss_of(engine)
        with pytest.raises(StateError, match="are saved for a backward"):
            engine.release_device()
        loss.backward()
    linear = seeded(lambda: nn.Linear(8, 8, bias=False))  # one group, which is used repeatedly
    with offload.initialize(linear, config(tmp_path, HERE, budget=BUDGET)) as engine:
        given = torch.ones(2, 8, requires_grad=True)
        loss = linear(given).sin().sum()
        expected = torch.autograd.grad(loss, given, retain_graph=True)
        engine.release_device(host=True)
        with pytest.raises(StateError, match="asleep"):
            torch.autograd.grad(loss, given, retain_graph=True)
        engine.restore_device()
        assert torch.equal(*torch.autograd.grad(loss, given), *expected)


def full(patch: pytest.MonkeyPatch) -> None:
    def write(*_: Any, owner: str, **__: Any) -> None:
        raise TierFullError("nvme", owner, 1, 0, 1, "raise budget.nvme")

    patch.setattr(BlockStore, "write", write)


def view(engine: offload.Engine) -> torch.Tensor:
    return next(engine.module.parameters()).detach()


@pytest.mark.parametrize(("seen", "error"), [(False, TierFullError), (True, StateError)])
def test_a_release_that_is_refused_changes_nothing(
    seen: bool, error: type[OffloadError], tmp_path: Path
) -> None:
    runs = []
    for refused in (True, False):
        with engine_of(tmp_path, HERE, optimizer={"lr": 1e-2, "master": "none"}) as engine:
            losses = losses_of(engine, batches(2))
            with pytest.MonkeyPatch.context() as patch:
                if refused:
                    kept = view(engine) if seen else full(patch)
                    with pytest.raises(error), engine.asleep(host=True):
                        pass
                    del kept
            assert not engine.is_asleep
            engine.check_integrity()
            runs.append(losses + losses_of(engine, batches(4)[2:]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("failing", [(HostMemory, "take_again"), (BlockStore, "read")])
def test_a_restore_that_fails_can_be_called_again(failing: Any, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with engine_of(tmp_path) as engine:
        expected = states_of(engine)
        engine.release_device(host=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*failing, fail, raising=False)
            with pytest.raises((TierFullError, torch.OutOfMemoryError)):
                engine.restore_device()
        with pytest.raises(StateError, match="asleep"):
            states_of(engine)
        engine.restore_device()
        assert_same_bits(states_of(engine), expected)


def test_what_cannot_be_released_is_named(tmp_path: Path) -> None:
    with engine_of(tmp_path, budget={**BUDGET, "nvme": 0}) as engine:
        with pytest.raises(ConfigError, match=r"budget\.nvme is 0"):
            engine.release_device(host=True)
        with pytest.raises(ConfigError, match="on_use='sleep'"):
            engine.release_device(on_use="sleep")  # type: ignore[arg-type]
        with engine.gathered(), pytest.raises(StateError, match="gathered"):
            engine.release_device()
        assert not engine.is_asleep


def test_errors_interrupts_and_nested_blocks_end_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path) as engine:
        with suppress(ZeroDivisionError), engine.asleep():
            with engine.asleep(host=True):
                pass
            assert engine.is_asleep
            _ = 1 // 0
        assert not engine.is_asleep
        leave = engine._tier_manager.leave
        interrupted = lambda: (os.kill(os.getpid(), signal.SIGINT), leave())[1]  # noqa: E731
        monkeypatch.setattr(engine._tier_manager, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt), engine.asleep():  # comes once all is released
            raise AssertionError("not reached")
        assert not engine.is_asleep
        losses_of(engine, batches(1))


@pytest.mark.parametrize("keep", ["host", "drop"])
def test_it_is_closed_asleep(keep: Any, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    losses_of(engine, batches(1))
    engine.save_checkpoint(tmp_path / "saved", wait=False)
    expected = parameters_of(engine)
    engine.release_device(host=True)
    engine.close(keep)
    if keep == "host":
        assert_same_bits({n: p.detach() for n, p in engine.module.named_parameters()}, expected)
    with pytest.raises(StateError, match="closed"):
        engine.restore_device()
    with engine_of(tmp_path) as engine, engine.asleep(host=True):
        engine.close(keep)


def test_a_dispatched_model_sleeps(tmp_path: Path) -> None:
    model, tokens = seeded(TinyLM), batches(1)[0][:, :-1]
    with torch.no_grad():
        expected = bits(model(tokens))
        offload.dispatch(model, config(tmp_path, {"parameters": "device"}, budget=BUDGET))
        with offload.dispatched(model) as owner:
            with owner.asleep(host=True), pytest.raises(StateError, match="asleep"):
                model(tokens)
            assert bits(model(tokens)) == expected


def experts() -> Any:
    transformers = pytest.importorskip("transformers")
    names = ["hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"]
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **dict.fromkeys(names, 16), vocab_size=37, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


QUANTIZED = {"storage": {"weights": "nf4"}, "precision": "bf16"}


@pytest.mark.parametrize(("build", "keys"), [(TinyLM, {}), (experts, {}), (adapted, QUANTIZED)])
def test_weights_are_those_of_the_state_dict(build: Any, keys: Any, tmp_path: Path) -> None:
    model = seeded(build)
    model.again = nn.BatchNorm1d(2, affine=False)  # buffers alone, under two names
    model.twice = model.again
    model.register_buffer("not_kept", torch.ones(2), persistent=False)
    with offload.initialize(model, config(tmp_path, NVME, budget=BUDGET, **keys)) as engine:

        def step() -> None:
            out = model(batches(1)[0][:, :-1])
            engine.backward(getattr(out, "logits", out).float().square().mean())
            engine.optimizer.step()  # updates are pending
            engine.optimizer.zero_grad()

        step()
        assert_same_bits(dict(engine.named_weights(buffers=True)), model.state_dict())
        assert "again.running_var" not in dict(engine.named_weights())
        half = engine.named_weights()
        next(half)
        with engine.asleep(host=True), pytest.raises(StateError, match="asleep"):
            list(half)
        half = engine.named_weights()
        next(half)
        step()  # an iterator that is left holds nothing
        with pytest.raises(StateError, match="changed while named_weights"):
            list(half)


def test_syncs_and_sleeps_leave_nothing_behind(tmp_path: Path) -> None:
    descriptors, rss = [], []
    with engine_of(tmp_path, NVME) as engine:
        for _ in range(30):
            for _ in engine.named_weights():
                pass
            with engine.asleep(host=True):
                pass
            trim_memory()
            descriptors.append(len(os.listdir("/proc/self/fd")))
            rss.append(rss_nbytes())
    assert min(descriptors[-12:]) == min(descriptors[5:17])  # other threads open some for a moment
    assert max(rss[5:]) - min(rss[5:]) < 8 << 20


def on_two_ranks(folder: str, stage: int, sleeps: bool) -> Any:
    torch.set_num_threads(1)
    placement = HOST if stage == 3 else HERE
    with engine_of(Path(folder), placement, zero={"stage": stage}) as engine:
        for number in range(4):
            engine.backward(loss_of(engine, 2 * number + torch.distributed.get_rank()))
            if sleeps:
                with engine.asleep(host=number % 2 == 0):
                    pass
            if number % 2:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            if torch.distributed.get_rank() == 1:
                full(patch)
            with pytest.raises(BudgetError) as refused:
                engine.release_device(host=True)
        return str(refused.value), dict(engine.named_weights()), engine.module.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_sleep_together(stage: int, tmp_path: Path) -> None:
    slept, awake = (
        run_ranks(2, tmp_path / str(sleeps), on_two_ranks, str(tmp_path), stage, sleeps)
        for sleeps in (True, False)
    )
    assert "another rank" in slept[0][0]
    assert "nvme tier full" in slept[1][0]
    for rank in range(2):
        assert_same_bits(slept[rank][1], slept[rank][2])
        assert_same_bits(slept[rank][1], awake[rank][1])


def test_deepspeeds_names_release_and_restore() -> None:
    model = nn.Linear(4, 1)
    keys = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, config=keys, model_parameters=model.parameters())
    engine.offload_states()
    with pytest.raises(StateError, match="asleep"):
        engine(torch.ones(1, 4))
    engine.reload_states(non_blocking=True)
    engine.offload_states(include=["optim_states"], device="cpu", pin_memory=False)
    engine.backward(engine(torch.ones(1, 4)).sum())  # DeepSpeed has the weights still
    with pytest.raises(ConfigError, match="expected one of cpu, nvme"):
        engine.offload_states(device="none")
    engine.destroy()
