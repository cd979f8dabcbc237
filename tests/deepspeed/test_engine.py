"""A DeepSpeed loop, its import changed, trains what plain PyTorch trains."""

import argparse
import json
import logging
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload.deepspeed as deepspeed
from offload.tiers.errors import (
    CheckpointError,
    ConfigError,
    OffloadError,
    StateError,
    UnsupportedError,
)
from tests.deepspeed.loops import (
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

mse = nn.functional.mse_loss
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.02}}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_loop_is_plain_pytorchs(device: str, tmp_path: Path) -> None:
    net = model()
    plain = Plain(net, kind=WARMUP["type"], params=WARMUP["params"])
    place = {"device": device, "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    with initialized(net, {**BASE, "scheduler": WARMUP, "zero_optimization": zero}) as engine:
        assert train(engine, range(10)) == pytest.approx(plain.train(range(10)))
        assert engine.get_global_grad_norm() == pytest.approx(plain.norms[-1])
        assert engine.get_lr() == [plain.optimizer.param_groups[0]["lr"]]
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 10, 18)
        assert same(weights(engine.module), weights(plain.model))


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


@pytest.mark.parametrize("said", [True, False], ids=["boundary", "no_sync"])
def test_the_loop_may_say_where_the_boundary_is_or_that_ranks_do_not_sync(said: bool) -> None:
    net = model()
    plain = Plain(net)
    with initialized(net) as engine:
        for number in range(6):
            if said:
                engine.set_gradient_accumulation_boundary(number % 3 == 2)
            with nullcontext() if said else engine.no_sync():
                engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
            if number % 3 == 2 or not said:
                engine.step()
        plain.train(range(6))
        assert same(weights(net), weights(plain.model))


def test_the_returned_loss_is_divided_and_need_not_be() -> None:
    with initialized(model()) as engine:
        x, y = batch(0)
        loss = mse(engine(x), y)
        assert torch.equal(engine.backward(loss, retain_graph=True), loss / 3)
        divided = engine.module[0].weight.grad.clone()
        engine.zero_grad()
        assert torch.equal(engine.backward(loss, scale_wrt_gas=False), loss)
        whole = engine.module[0].weight.grad.clone()
        assert torch.allclose(divided * 3, whole)


def test_a_backward_of_the_loops_own_is_refused_where_it_would_be_another_gradient() -> None:
    with initialized(model()) as engine:
        mse(engine(batch(0)[0]), batch(0)[1]).backward()
        with pytest.raises(StateError, match=r"steps: 3; call engine\.backward\(loss\)"):
            engine.step()
    with initialized(model(), FP16) as engine:
        x, y = batch(0, torch.float16)
        with pytest.raises(StateError, match=r"call engine\.backward\(loss\)"):
            mse(engine(x).float(), y.float()).backward()
    net = model()
    plain = Plain(net, steps=1)
    with initialized(net, {**BASE, "gradient_accumulation_steps": 1}) as engine:
        for number in range(3):
            mse(engine(batch(number)[0]), batch(number)[1]).backward()
            engine.step()
        plain.train(range(3))
        assert same(weights(net), weights(plain.model))


# ---------------------------------------------------------------- fp16 and bf16
FP16 = {
    **BASE, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    "gradient_accumulation_steps": 2,
}  # fmt: skip


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


def test_bf16_has_masters() -> None:
    with initialized(model(), {**BASE, "bf16": {"enabled": True}}) as engine:
        param = engine.module[0].weight
        for number in range(3):
            x, y = batch(number, torch.bfloat16)
            engine.backward(mse(engine(x).float(), y.float()))
            engine.step()
        master = engine.optimizer.state[param]["master"].clone()
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
    given = torch.optim.AdamW(groups(net), lr=0.02, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    theirs = torch.optim.AdamW(groups(plain), lr=0.02, betas=(0.8, 0.9))
    other = torch.optim.lr_scheduler.StepLR(theirs, 1, gamma=0.5)
    config = {key: BASE[key] for key in ("train_micro_batch_size_per_gpu", "gradient_clipping")}
    with initialized(net, config, optimizer=given, lr_scheduler=schedule) as engine:
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
            assert given.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        assert engine.get_lr() == [group["lr"] for group in theirs.param_groups]
        assert same(weights(net), weights(plain))
        with pytest.raises(UnsupportedError, match=r"AdamW\.step\(\)"):
            given.step()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), "sgd"),
        (torch.optim.AdamW, "adamw"),
        (torch.optim.Adam, "adam"),
    ],
)
def test_client_optimizers_train_as_they_would(make: Any, kind: str) -> None:
    net, plain = model(), model()
    optimizer = make(plain.parameters())
    config = {"train_batch_size": BATCH, "gradient_clipping": 0}
    with initialized(net, config, optimizer=make) as engine:
        assert engine.offload.config.optimizer.type == kind
        train(engine, range(3))
        for number in range(3):
            optimizer.zero_grad()
            mse(plain(batch(number)[0]), batch(number)[1]).backward()
            optimizer.step()
        assert same(weights(net), weights(plain))


def test_a_client_optimizer_goes_on_where_it_was() -> None:
    net, plain = model(), model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (net, plain)]
    for each, optimizer in zip((net, plain), optimizers, strict=True):
        mse(each(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = {"train_batch_size": BATCH, "gradient_clipping": 0}
    with initialized(net, config, optimizer=optimizers[0]) as engine:
        train(engine, range(1, 2))
        mse(plain(batch(1)[0]), batch(1)[1]).backward()
        optimizers[1].step()
        assert same(weights(net), weights(plain))


def test_a_client_optimizer_without_a_rule_is_refused() -> None:
    net = model()
    with pytest.raises(UnsupportedError, match="no rule here"):
        deepspeed.initialize(
            model=net, optimizer=torch.optim.RMSprop(net.parameters()), config={**BASE}
        )


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


def test_values_written_under_zero_init_are_not_lost_in_silence() -> None:
    values = model().state_dict()
    with deepspeed.zero.Init(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = model()
        net.load_state_dict(values)
        with pytest.raises(StateError, match=r"inside zero\.Init"):
            deepspeed.initialize(model=net, config=BASE)
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
    with initialized(net):
        with deepspeed.zero.GatheredParameters(net.parameters(), modifier_rank=0):
            assert net[0].weight.data.eq(1).all()
            net[0].weight.data.fill_(2)
        assert net[0].weight.eq(2).all()
        with deepspeed.zero.GatheredParameters([net[0].weight], enabled=False):
            pass


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


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with initialized(model()) as engine:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            engine.load_checkpoint(tmp_path, "none")
        with pytest.raises(UnsupportedError, match="state holds tests"):
            engine.save_checkpoint(tmp_path, client_state={"f": train})
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs/mp_rank_00_model_states.pt").touch()
        with pytest.raises(CheckpointError, match="written by DeepSpeed"):
            engine.load_checkpoint(tmp_path, "theirs")
        engine.offload.save_checkpoint(tmp_path / "alone")
        with pytest.raises(CheckpointError, match="has no complete state of a loop"):
            engine.load_checkpoint(tmp_path, "alone")
        with pytest.raises(UnsupportedError, match="offload checkpoint export"):
            engine.load_checkpoint(tmp_path, "alone", load_module_only=True)


def test_parameters_that_the_checkpoint_lacks_are_refused_also_without_strict(
    tmp_path: Path,
) -> None:
    net = model()
    with initialized(net) as engine:
        engine.save_checkpoint(tmp_path, tag="one")
        engine.load_checkpoint(tmp_path, "one", load_module_strict=False)
    larger = torch.nn.Sequential(net, torch.nn.Linear(2, 2))
    with initialized(larger) as engine, pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path, "one", load_module_strict=False)


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


# ---------------------------------------------------------------- the rest
def test_a_loader_of_the_training_data() -> None:
    data = [(torch.full((IN,), float(i)), torch.zeros(OUT)) for i in range(7)]
    config = {**BASE, "dataloader_drop_last": True}
    engine, _, loader, _ = deepspeed.initialize(model=model(), config=config, training_data=data)
    assert loader is engine.training_dataloader
    assert [len(x) for x, _ in loader] == [2, 2, 2]
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
        ({"optimizer": {"type": "Lamb"}}, "no rule here"),
        ({"offload": {"budgets": {}}}, "budgets: unknown key"),
        ({"offload": 3}, "expected keys and values"),
        ({"offload": {"optimizer": {"in_backward": True}}}, "in_backward"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: .sum. is not supported"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast: .* is not supported"),
    ],
)
def test_a_configuration_is_refused_before_anything_is_made(
    change: dict[str, Any], words: str
) -> None:
    net = model()
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        deepspeed.initialize(model=net, config={**BASE, **change})
    assert all(param.requires_grad for param in net.parameters())


def test_attributes_of_the_model_and_those_that_are_not_there() -> None:
    net = model()
    net.kind = "of the model"  # type: ignore[assignment]
    with initialized(net) as engine:
        assert engine.kind == "of the model"
        assert engine.module is net
        assert not engine.eval().training
        for name in "save_16bit_model", "nonsense":
            assert not hasattr(engine, name)
            with pytest.raises(AttributeError, match=f"'{name}'"):
                getattr(engine, name)
    with pytest.raises(ImportError, match="init_inference"):
        from offload.deepspeed import init_inference  # noqa: F401
    with pytest.raises(AttributeError, match="'utils'"):
        _ = deepspeed.utils


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
    finally:
        dist.destroy_process_group()


def test_parameters_come_in_every_form_that_torch_takes() -> None:
    net = model()
    groups = [
        {"params": net[0].weight}, {"params": []}, {"params": [("bias", net[0].bias)]},
        {"params": iter(net[2].parameters()), "lr": 0.5},
    ]  # fmt: skip
    with initialized(net, model_parameters=groups) as engine:
        assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == 4
        assert all(param.requires_grad for param in net.parameters())
