"""What models do besides calling their modules once in order."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from offload.errors import UnsupportedError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, WIDTH, TinyLM, batches, seeded
from tests.offload.engine_states import assert_same_bits, parameters_of, train_step
from tests.offload.plain_training import (
    EVERYWHERE,
    MakeEngine,
    assert_close,
    check,
    floats,
    square_loss,
    tokens_loss,
    trained_plainly,
)

pytestmark = MARKS


class Borrowing(nn.Module):
    """Uses its embedding's weight as a head, outside the embedding's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2100, WIDTH)  # large enough for a group of its own
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.embed(tokens))
        return nn.functional.linear(x, self.embed.weight)


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_a_parameter_used_outside_its_modules_forward_is_gathered(
    make: MakeEngine, placement: Any
) -> None:
    check(make, Borrowing, square_loss, batches(3), placement)


class WideAttention(nn.Module):
    """Reads `out_proj.weight` without calling `out_proj`; too large to be one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(160, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x)[0]
        return y


def test_multihead_attention_reads_its_projection_without_calling_it(make: MakeEngine) -> None:
    data = floats(1, 2, 3, 160)  # one step: its key bias has no gradient but rounding
    engine = check(make, WideAttention, square_loss, data)
    assert len(engine.store.groups) > 1


class Encoder(nn.Module):
    """Computes what is not padded alone, in `eval`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        y: Tensor = self.encoder(self.first(x), src_key_padding_mask=padded)
        return y


@pytest.mark.parametrize("frozen", [False, True])
def test_an_encoder_takes_no_fast_path(make: MakeEngine, frozen: bool, caplog: Any) -> None:
    torch.backends.mha.set_fastpath_enabled(True)
    x = floats(1, 3, 7, 32)[0].to(ON)
    padded = torch.arange(7, device=ON) >= torch.tensor([[5], [7], [3]], device=ON)
    context = torch.enable_grad if frozen else torch.no_grad
    caplog.set_level(logging.INFO, "offload")
    for placement in HOST, NVME:
        engine = make(seeded(Encoder).requires_grad_(not frozen), placement)
        plain = seeded(Encoder).to(ON).eval().requires_grad_(not frozen)
        with context():
            assert torch.equal(engine.module.eval()(x, padded), plain(x, padded))
        engine.check_integrity()
    assert caplog.text.count("set_fastpath_enabled(False)") == 1


@pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning")  # cuDNN copies them together
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_keep_their_own_list_of_weights(make: MakeEngine, kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = kind(WIDTH, 8, num_layers=2, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x)[0]
            return y

    check(make, Recurrent, square_loss, floats(3, 3, 2, WIDTH))


class ReturnsItsParameter(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6, WIDTH))
        self.whole = whole

    def forward(self, length: int) -> Tensor:
        return self.position if self.whole else self.position[:length]


class UsesReturned(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.position = ReturnsItsParameter(whole)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        position = self.position(len(x))[: len(x)]
        hidden = self.first(x)
        y: Tensor = self.last(hidden + self.first(position)) * self.scale
        return y


@pytest.mark.parametrize("whole", [False, True], ids=["a view", "all of it"])
def test_a_module_may_return_its_parameter(make: MakeEngine, whole: bool) -> None:
    check(make, lambda: UsesReturned(whole), square_loss, floats())


@pytest.mark.parametrize("optimizer", ["host", "nvme"])
def test_between_steps_a_parameter_in_ram_never_shows_half_an_update(
    make: MakeEngine, optimizer: str
) -> None:
    model = seeded(TinyLM)
    with make(model, {**HOST, "optimizer": optimizer}) as engine:
        model.loss(batches(1)[0]).backward()
        engine.optimizer.step()
        weight = model.embed.weight.detach().clone()
        final = engine.values.full(model.embed.weight)
        assert_same_bits({"weight": weight}, {"weight": final})
        model.loss(batches(1)[0])
        assert_same_bits({"weight": model.embed.weight.detach()}, {"weight": final})


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "to(dtype=)": lambda p: p.to(dtype=torch.float64),
    "to(device, dtype=)": lambda p: p.to(ON, dtype=torch.bfloat16),
    "to(device=, dtype=)": lambda p: p.to(device=ON, dtype=torch.float32),
    "to(dtype)": lambda p: p.to(torch.float64),
    "to(tensor)": lambda p: p.to(torch.zeros(1, dtype=torch.float64, device=ON)),
    "to(copy=True)": lambda p: p.to(ON, copy=True),
    "to(memory_format=)": lambda p: p.to(memory_format=torch.channels_last),
    "float(memory_format=)": lambda p: p.float(memory_format=torch.channels_last),
    "type(dtype=)": lambda p: p.type(dtype=torch.float64),
    "type(dtype)": lambda p: p.type(torch.float64),
    "double": lambda p: p.double(),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_released_parameter_is_converted_with_its_values(
    make: MakeEngine, conversion: str
) -> None:
    convert = CONVERSIONS[conversion]
    plain = seeded(lambda: nn.Conv2d(3, 4, 3)).to(ON)
    made = make(seeded(lambda: nn.Conv2d(3, 4, 3))).module.weight
    actual, expected = convert(made), convert(plain.weight)
    assert torch.equal(actual, expected)
    assert actual.dtype == expected.dtype
    assert actual is made or actual.stride() == expected.stride()


def test_a_model_of_convolutions_may_be_put_into_another_memory_format(make: MakeEngine) -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        model.to(memory_format=torch.channels_last)
        return square_loss(model, x)

    def layers() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    images = [torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    _, expected, _ = trained_plainly(layers, loss_of, images)
    engine = make(seeded(layers))
    for x in images:
        train_step(engine.optimizer, loss_of(engine.module, x.to(ON)))
    assert_close(parameters_of(engine), expected)


def test_what_reads_memory_by_its_address_is_refused_for_a_released_parameter(
    make: MakeEngine,
) -> None:
    weight = make(seeded(TinyLM)).module.head.weight
    with pytest.raises(UnsupportedError, match=r"storage\(\) of .*weight.*engine\.gathered"):
        safetensors.torch.save({"weight": weight})
    saved = safetensors.torch.load(safetensors.torch.save({"weight": weight.detach().clone()}))
    assert torch.equal(saved["weight"], weight)


def test_save_on_cpu_around_the_model_still_sees_its_activations(make: MakeEngine) -> None:
    def loss_of(model: Any, tokens: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return tokens_loss(model, tokens)

    check(make, TinyLM, loss_of, batches(2))
