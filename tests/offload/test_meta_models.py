"""A model on the meta device begins as its constructor would have begun it, or is refused by name:
what is not known is never left as memory happened to be."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
from offload.errors import CheckpointError, UnsupportedError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, WIDTH, config
from tests.offload.engine_states import assert_same_bits, parameters_of

pytestmark = MARKS

VOCABULARY, LENGTH = 32, 8


class OwnNorm(nn.Module):
    """A layer norm as nanoGPT writes it: nothing says again what its constructor filled in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Norm(OwnNorm):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """With a causal mask in a buffer."""

    mask: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(self.mask == 0, -math.inf)
        y: Tensor = self.c_proj(scores.softmax(-1) @ v)
        return y


class MaskedAttention(Attention):
    def reset_parameters(self) -> None:
        self.mask.copy_(torch.tril(torch.ones(LENGTH, LENGTH)))


class NanoGPT(nn.Module):
    """As nanoGPT: `_init_weights` for all modules, then some weights again."""

    def __init__(
        self, attention: type[Attention] = MaskedAttention, norm: type[OwnNorm] = Norm,
        rescale: bool = False, tie: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": norm(WIDTH), "attention": attention(WIDTH)}) for _ in range(2)
        )
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tie:
            self.wte.weight = self.head.weight
        self.apply(self._init_weights)
        if rescale:
            for name, param in self.named_parameters():
                if name.endswith("c_proj.weight"):
                    nn.init.normal_(param, std=0.02 / math.sqrt(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = x + block["attention"](block["norm"](x))  # type: ignore[index]
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def begun(folder: Path, model: nn.Module, placement: Any = HOST, **keys: Any) -> dict[str, Tensor]:
    """Parameters and buffers that a meta model begins with."""
    weights = keys.pop("weights", None)
    settings = config(folder, placement, **keys)
    with offload.initialize(model, settings, weights=weights) as engine:
        tensors = {**parameters_of(engine), **dict(model.named_buffers())}
        return {name: value.clone().cpu() for name, value in tensors.items()}


def begun_on_cpu(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = build()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_begun_alike(actual: dict[str, Tensor], build: Callable[[], nn.Module]) -> None:
    """Equal where a constructor always gives the same, else of the same mean and spread."""
    one, other = begun_on_cpu(build, 0), begun_on_cpu(build, 1)
    assert actual.keys() == one.keys()
    for name, mine in actual.items():
        a, b = one[name].detach(), other[name].detach()
        assert (mine.shape, mine.dtype) == (a.shape, a.dtype), name
        constant = (a == b) | (a.isnan() & b.isnan())
        assert torch.equal(mine[constant], a[constant]), name
        random = torch.cat([a[~constant], b[~constant]]).double()
        if len(random) < 32:
            assert mine[~constant].isfinite().all(), name
            continue
        values, close = mine[~constant].double(), 6 / math.sqrt(len(random) / 2)
        spread = random.std()
        assert (values.mean() - random.mean()).abs() < close * spread, name
        assert abs(values.std() / spread - 1) < close, name


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_with_init_weights_begins_as_its_constructor_begins_it(
    tmp_path: Path, tie: bool
) -> None:
    def build() -> nn.Module:
        return NanoGPT(tie=tie)

    actual = begun(tmp_path, on_meta(build))
    assert_begun_alike(actual, build)
    assert_same_bits(begun(tmp_path, on_meta(build), NVME), actual)
    keys = {"groups": {"blocks": ["MaskedAttention"]}}
    assert_same_bits(begun(tmp_path, on_meta(build), NVME, **keys), actual)
    other = begun(tmp_path, on_meta(build), seed=1)
    assert not torch.equal(other["wte.weight"], actual["wte.weight"])


class Mixed(nn.Module):
    """Buffers and parameters of every sort that torch's modules initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([
            nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, affine=False), nn.LayerNorm(WIDTH),
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        ])  # fmt: skip
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH)
        self.conv = nn.Conv1d(4, 6, 3)
        self.bilinear = nn.Bilinear(4, 5, 6)
        self.prelu = nn.PReLU()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True), 2
        )


def test_modules_of_torch_begin_as_their_constructors_begin_them(tmp_path: Path) -> None:
    actual = begun(tmp_path, on_meta(Mixed))
    assert_begun_alike(actual, Mixed)
    assert begun(tmp_path, on_meta(lambda: nn.Transformer(WIDTH, 2, 1, 1, WIDTH, batch_first=True)))


def test_what_already_has_values_keeps_them(tmp_path: Path) -> None:
    def build() -> Any:
        model: Any = on_meta(NanoGPT)
        model.norm = nn.BatchNorm1d(WIDTH)
        model.norm.running_mean.fill_(3.0)
        model.blocks[0]["attention"].c_proj = nn.Linear(WIDTH, WIDTH)
        return model

    model = build()
    given = model.blocks[0]["attention"].c_proj.weight.detach().clone()
    tensors = begun(tmp_path, model)
    assert torch.equal(tensors["blocks.0.attention.c_proj.weight"], given)
    assert torch.equal(tensors["norm.running_mean"], torch.full((WIDTH,), 3.0))
    assert torch.equal(tensors["blocks.0.attention.mask"], torch.ones(LENGTH, LENGTH).tril())


def test_a_parameter_stays_the_same_object_with_what_hangs_on_it(tmp_path: Path) -> None:
    model = on_meta(NanoGPT)
    weight = model.head.weight
    weight.is_special = True
    calls = []
    weight.register_hook(lambda gradient: calls.append(gradient.shape))
    decayed, others = [weight], [p for p in model.parameters() if p is not weight]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    with offload.initialize(model, config(tmp_path), parameters=groups) as engine:
        assert model.head.weight is weight is model.wte.weight
        assert weight.is_special
        assert engine.optimizer.param_groups[0]["params"][0] is weight
        before = parameters_of(engine)
        engine.backward(model(torch.arange(LENGTH, device=ON).view(1, -1)))
        engine.optimizer.step()
        assert calls == [weight.shape]
        assert not torch.equal(parameters_of(engine)["wte.weight"], before["wte.weight"])


def test_integers_and_masks_in_parameters_and_buffers_are_initialised(tmp_path: Path) -> None:
    class Model(nn.Linear):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__(WIDTH, 3)
            self.codes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.register_buffer("again", self.mask)

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "mask"):
                self.codes.data.copy_(torch.arange(5))
                self.mask.copy_(torch.tensor([True, False, True]))

    model = on_meta(Model)
    tensors = begun(tmp_path, model)
    assert tensors["codes"].tolist() == [0, 1, 2, 3, 4]
    assert tensors["mask"].tolist() == [True, False, True]
    assert model.again is model.mask


def test_weights_from_files_leave_buffers_to_the_files_or_their_modules(tmp_path: Path) -> None:
    build = [lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), OwnNorm(4))][0]
    source = build()
    assert isinstance(source[1], nn.BatchNorm1d)
    source[1].running_mean = torch.arange(4.0)
    saved = {name: value.clone() for name, value in source.state_dict().items()}
    del saved["1.running_var"]
    save_file(saved, tmp_path / "model.safetensors")
    for model in (on_meta(build), build()):
        tensors = begun(tmp_path, model, weights=tmp_path / "model.safetensors")
        assert_same_bits({**tensors}, {**saved, "1.running_var": torch.ones(4)})


@pytest.mark.parametrize("value", [torch.ones(1), torch.full((4,), 1.5), torch.ones(2, 2)])
def test_a_buffer_that_the_files_have_otherwise_is_refused(tmp_path: Path, value: Tensor) -> None:
    class Counter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("count", torch.zeros(4, dtype=torch.int64))

    saved = {name: tensor.clone() for name, tensor in Counter().state_dict().items()}
    save_file({**saved, "count": value}, tmp_path / "model.safetensors")
    for model in (on_meta(Counter), Counter()):
        with pytest.raises(CheckpointError, match="weights: count"):
            begun(tmp_path, model, weights=tmp_path / "model.safetensors")


class Zeroed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.gate.weight)


class Partly(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:, 0].zero_()
            self.bias.zero_()


class PartlyMasked(nn.Linear):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "mask"):
            self.mask[0] = True


class TiedOtherwise(nn.Module):
    """The head's weight, of which the embedding knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.embed.weight = self.head.weight


class ZeroedHead(nn.Module):
    """What `_init_weights` writes is not counted on the meta device, what follows it is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.apply(self._init_weights)
        nn.init.zeros_(self.head.weight)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.table = torch.arange(4)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own norms": (lambda: NanoGPT(norm=OwnNorm), r"blocks\.0\.norm\.weight, .*bias.*OwnNorm"),
    "masks": (lambda: NanoGPT(attention=Attention),
              r"blocks\.0\.attention\.mask on .* of Attention"),
    "rescaled": (lambda: NanoGPT(rescale=True), r"c_proj\.weight .*written 3"),
    "zeroed": (Zeroed, r"^gate\.weight on .*written 2 times"),
    "partly": (lambda: Partly(3, 3), r"^weight on .* that the constructor of Partly filled"),
    "partly masked": (PartlyMasked, r"^mask on .* that the constructor of PartlyMasked"),
    "tied otherwise": (TiedOtherwise, r"^embed\.weight .* is head\.weight, too"),
    "zeroed after trunc_normal_": (ZeroedHead, r"^head\.weight on .*written 2 times"),
    "an attribute": (Plain, r"^table is a tensor on the meta device"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_initialised_as_constructed_is_named(tmp_path: Path, case: str) -> None:
    build, text = REFUSED[case]
    with pytest.raises(UnsupportedError, match=text):
        begun(tmp_path, on_meta(build))


def test_a_refusal_before_anything_is_made_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), OwnNorm(WIDTH)))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"1\.weight, 1\.bias"):
            begun(tmp_path, model)
    assert all(p.is_meta for p in model.parameters())
    model[1] = nn.LayerNorm(WIDTH)
    assert begun(tmp_path, model)


def test_an_attribute_without_values_is_refused_beside_files_too(tmp_path: Path) -> None:
    save_file(dict(nn.Linear(WIDTH, WIDTH).named_parameters()), tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"^table is a tensor on the meta device"):
        begun(tmp_path, on_meta(Plain), weights=tmp_path / "model.safetensors")


def test_a_refused_model_begins_from_files(tmp_path: Path) -> None:
    torch.manual_seed(5)
    values = {name: p.detach().clone() for name, p in NanoGPT(norm=OwnNorm).named_parameters()}
    save_file(values, tmp_path / "model.safetensors")

    model = on_meta(lambda: NanoGPT(norm=OwnNorm, rescale=True))
    tensors = begun(tmp_path, model, weights=tmp_path / "model.safetensors")
    assert_same_bits({name: tensors[name] for name in values}, values)


def test_a_part_of_a_model_that_is_transformers_begins_as_transformers_begins_it(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip

    class Reward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.LlamaForCausalLM(copy.deepcopy(shape))
            self.score = nn.Linear(32, 1)

    actual = begun(tmp_path, on_meta(Reward))
    assert_begun_alike(actual, Reward)
    assert 0.018 < actual["model.model.layers.0.self_attn.q_proj.weight"].std() < 0.022

    class Zero(Reward):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.model.model.layers[0].mlp.down_proj.weight)

    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.down_proj\.weight .*written 2"):
        begun(tmp_path, on_meta(Zero))
