"""Every causal language model of transformers that builds from a tiny random configuration, against
itself without offload, to the bit: trained on nvme, dispatched, begun on the meta device, opened
from its files and saved to them.

A sample by default; with --long each test has to have compared most of the architectures.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import NVME, bits, config, gradients_of
from tests.offload.test_meta_models import assert_begun_alike, begun, on_meta
from tests.outside.pretrained_cases import (
    assert_same_files,
    assert_same_model,
    opened,
    plainly,
    saved,
)
from tests.outside.zoo import MAX_NUMEL, NAMES, build, tiny_config, transformers

MIN_EQUAL = 120  # of the 178 that transformers 5.17 has: 34 do not build, 6 are not tiny
BUDGET = {"host": "64MiB", "nvme": "256MiB"}
# Theirs leaves these to the constructor: nothing says again what it filled in.
REFUSED = {"apertus", "ernie4_5_moe", "openai-gpt"}

every_architecture = pytest.mark.parametrize("model_type", sorted(NAMES))
equal: Counter[str] = Counter()


pytestmark = pytest.mark.usefixtures("quiet_transformers")


@contextmanager
def without_offload() -> Iterator[None]:
    """Skips architectures that transformers itself does not build, train or save this small."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever keeps it from that
        pytest.skip(f"{type(error).__name__}: {error}".split("\n")[0][:90])


def drawn_tokens() -> Tensor:
    return torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(2))


def loss_and_gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    torch.manual_seed(1)  # dropout that no key turns off
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def assert_equal_step(plain: nn.Module, engine: offload.Engine, tokens: Tensor) -> None:
    expected_loss = loss_and_gradients(plain, tokens)
    loss = loss_and_gradients(engine.module, tokens)
    assert bits(loss) == bits(expected_loss), (loss, expected_loss)
    actual = gradients_of(engine)
    expected = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    wrong = [name for name in actual if bits(actual[name]) != bits(expected[name])]
    assert not wrong, f"{len(wrong)} of {len(actual)} gradients differ: {wrong[:4]}"


@pytest.mark.sample(20)
@every_architecture
def test_two_steps_on_nvme_equal_plain_pytorch(model_type: str, tmp_path: Path) -> None:
    """The plain copy takes over the engine's weights after the first step, since AdamW itself
    agrees only to rounding."""
    tokens = drawn_tokens()
    with without_offload():
        plain = build(model_type)
        loss_and_gradients(plain, tokens)
    plain.zero_grad()
    settings = config(tmp_path, NVME, budget=BUDGET, optimizer={"chunk": 65536})
    with offload.initialize(build(model_type), settings) as engine:
        assert_equal_step(plain, engine, tokens)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        plain.zero_grad()
        plain.load_state_dict(engine.module.state_dict())
        assert_equal_step(plain, engine, tokens.flip(0))
        engine.optimizer.step()
        engine.settle()
        engine.check_integrity()
    equal["trained"] += 1


def generated(model: Any, tokens: Tensor) -> tuple[list[list[int]], list[bytes]]:
    """New tokens, and the logits that they were chosen from."""
    torch.manual_seed(1)
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, min_new_tokens=3,
        do_sample=False, use_cache=True, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return output.sequences.tolist(), [bits(each) for each in output.logits]


@pytest.mark.sample(40)
@every_architecture
def test_tokens_and_logits_are_those_in_ram(model_type: str, tmp_path: Path) -> None:
    with without_offload():
        expected = generated(build(model_type).eval(), drawn_tokens())
    settings = {
        "device": "cpu", "placement": {"parameters": {"host": "50%", "nvme": "50%"}},
        "budget": BUDGET, "nvme": {"paths": [str(tmp_path)]},
    }  # fmt: skip
    model = offload.dispatch(build(model_type).eval(), settings)
    with offload.dispatched(model) as dispatched:
        assert generated(model, drawn_tokens()) == expected
        dispatched.check_integrity()
    equal["dispatched"] += 1


@pytest.mark.sample("gpt2", "llama", "openai-gpt")
@every_architecture
def test_it_begins_on_the_meta_device_as_on_the_cpu(model_type: str, tmp_path: Path) -> None:
    """What is the same for all seeds (norms, masks, rotary frequencies, the row of the padding
    token) is equal, the other values have its mean and spread."""
    kind: Any = getattr(transformers, NAMES[model_type])
    with without_offload():
        shape = tiny_config(model_type)
        model = on_meta(lambda: kind(copy.deepcopy(shape)))
        if sum(param.numel() for param in model.parameters()) > MAX_NUMEL:
            pytest.skip("not tiny")
        kind(copy.deepcopy(shape))
    start = partial(begun, tmp_path, model, budget={"host": "64MiB", "nvme": "64MiB"})
    if model_type in REFUSED:
        with pytest.raises(UnsupportedError, match="nothing gives a value"):
            start()
        return
    actual = start()
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert_begun_alike(actual, lambda: kind(copy.deepcopy(shape)))
    equal["begun"] += 1


@pytest.mark.sample(25)
@every_architecture
def test_it_is_opened_and_saved_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    """Experts one by one, fused projections, in shards: as its files have them."""
    kind = getattr(transformers, NAMES[model_type])
    shard = "50KB" if sorted(NAMES).index(model_type) % 2 else "1GB"
    with without_offload():
        folder = saved(tmp_path / "model", model_type, shard=shard)
        plain = plainly(folder, kind)
        plain.save_pretrained(tmp_path / "expected")
    with opened(folder, tmp_path, kind) as engine:
        assert_same_model(plain, engine)
        engine.module.save_pretrained(tmp_path / "found")
    assert_same_files(tmp_path / "found", tmp_path / "expected")
    equal["opened"] += 1


@pytest.mark.slow
def test_enough_architectures_were_compared(request: pytest.FixtureRequest) -> None:
    """Runs last: fails when architectures stop building, whatever the reason."""
    if len(request.session.items) < 4 * len(NAMES):
        pytest.skip("only part of the architectures was selected")
    print(dict(equal))
    assert min(equal.values()) >= MIN_EQUAL, equal
