"""A Ctrl-C that was dropped on its way is raised at the next check, and one that cuts a call short
leaves the engine and torch as they were before the call."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import offload
from offload.process.interrupts import noted_interrupts
from tests.offload.engine_cases import HOST, MARKS, NVME, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of
from tests.offload.interrupt_points import assert_at_rest, saved_tensor_hooks
from tests.zero.test_inner_recomputation import Checkpointing

pytestmark = MARKS

BLOCKS = {"groups": {"blocks": ["Block"]}}
RECOMPUTED = BLOCKS | {"placement": NVME | {"activations": {"checkpoint": True}}}
SELECTIVE = BLOCKS | {
    "placement": NVME | {"activations": {"tier": "nvme", "checkpoint": "selective"}}
}
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "blocks": BLOCKS,
    "host": BLOCKS | {"placement": HOST},
    "recomputed": RECOMPUTED,
    "selective": SELECTIVE,
}
every_case = pytest.mark.parametrize("keys", CASES.values(), ids=CASES.keys())


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    with noted_interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def interrupted(module: nn.Module, call: int = 1, *, after: bool = False) -> Iterator[None]:
    """The block is left by a KeyboardInterrupt before (or after) that call of `module`."""
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    register = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = register(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        handle.remove()


def uninterrupted(folder: Path, keys: dict[str, Any], build: Any = TinyLM) -> Any:
    with offload.initialize(seeded(build), config(folder, **keys)) as engine:
        return losses_of(engine, batches(3)), states_of(engine)


@pytest.mark.sample(3)
@every_case
def test_after_an_interrupted_forward_a_checkpoint_is_saved_and_training_goes_on(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    expected_losses, expected = uninterrupted(tmp_path, keys)
    model, data = seeded(TinyLM), batches(3)
    with offload.initialize(model, config(tmp_path, **keys)) as engine:
        losses = losses_of(engine, data[:1])
        for module in (model, model.embed, model.blocks[1], model.blocks[1].mlp[0], model.norm):
            for after in (False, True):
                with interrupted(module, after=after):
                    model.loss(data[1])
                assert_at_rest(engine)
        engine.save_checkpoint(tmp_path / "saved")
        losses += losses_of(engine, data[1:])
        assert_same_bits(states_of(engine), expected)
    assert losses == expected_losses
    assert _get_current_function_mode_stack() == []
    assert saved_tensor_hooks() is None


class Watching(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@every_case
def test_contexts_around_an_interrupted_forward_are_left_as_they_were_entered(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, config(tmp_path, **keys)) as engine:
        for module in (model.blocks[1], model.blocks[1].mlp[0]):
            outer = Watching()
            with outer, torch.autograd.graph.save_on_cpu():
                hooks = saved_tensor_hooks()
                with interrupted(module), Watching(), torch.autograd.graph.save_on_cpu():
                    model.loss(batches(1)[0])
                assert _get_current_function_mode_stack() == [outer]
                assert saved_tensor_hooks() == hooks
            assert_at_rest(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    ("build", "keys", "module"),
    [
        (TinyLM, RECOMPUTED, "blocks.0.mlp"),
        (TinyLM, SELECTIVE, "blocks.0.mlp"),
        (Checkpointing, BLOCKS, "blocks.0.mlp.inner.0"),
    ],
    ids=["blocks", "selective", "the model's own"],
)
def test_a_checkpoint_that_fails_is_left_at_once_also_while_its_error_is_kept(
    tmp_path: Path, build: Any, keys: dict[str, Any], module: str, error: type[BaseException]
) -> None:
    model = seeded(build)

    def fail(*_: Any) -> None:
        raise error

    with offload.initialize(model, config(tmp_path, **keys)) as engine:
        handle = model.get_submodule(module).register_forward_pre_hook(fail)
        with torch.autograd.graph.save_on_cpu():
            hooks = saved_tensor_hooks()
            with pytest.raises(error) as kept:
                model.loss(batches(1)[0])
            assert saved_tensor_hooks() == hooks
        assert_at_rest(engine)
        handle.remove()
        del kept
        losses_of(engine, batches(1))
        assert_at_rest(engine)


def test_an_interrupt_amid_a_release_leaves_no_placeholder_for_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offload.initialize(seeded(TinyLM), config(tmp_path, **BLOCKS)) as engine:
        before = states_of(engine)
        for group in engine.store.groups:
            managed = group._managed

            class Interrupting:
                is_gathered = False

                def __iter__(self, managed: Any = managed) -> Any:
                    yield from managed[:1] if self.is_gathered else managed
                    if self.is_gathered:
                        raise KeyboardInterrupt
                    self.is_gathered = True

            with monkeypatch.context() as patch:
                patch.setattr(group, "_managed", Interrupting())
                if len(group.params) > 1:
                    with pytest.raises(KeyboardInterrupt), engine.gathered(*group.params):
                        pass
        assert_at_rest(engine)
        assert_same_bits(states_of(engine), before)


def test_an_interrupt_while_parameters_are_gathered_releases_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(group: Any) -> None:
        raise KeyboardInterrupt

    with offload.initialize(seeded(TinyLM), config(tmp_path, **BLOCKS)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("offload.zero.groups.weight_values._digests", interrupt)
            with pytest.raises(KeyboardInterrupt), engine.gathered():
                pass
        assert_at_rest(engine)
        engine.save_checkpoint(tmp_path / "saved")
