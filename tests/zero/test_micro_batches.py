"""Layer-wise micro-batching: same bits as the same arithmetic written out in plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import StateError, UnsupportedError
from tests.offload.engine_cases import (
    HOST,
    LENGTH,
    MARKS,
    NVME,
    ON,
    VOCABULARY,
    WIDTH,
    TinyLM,
    assert_same_bits,
    config,
    gradients_of,
    losses_of,
    seeded,
    states_of,
)

pytestmark = MARKS


def tokens(count: int, batch: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, LENGTH + 1)
    return [torch.randint(VOCABULARY, shape, generator=generator).to(ON) for _ in range(count)]


class Written(TinyLM):
    """What micro-batching means, in plain PyTorch: each block over its pieces, then the next."""

    sizes: tuple[int, ...] = (2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = torch.cat([block(piece) for piece in x.split(list(self.sizes))])
        logits: Tensor = self.head(self.norm(x))
        return logits


class WrittenUnevenly(Written):
    sizes = (1, 2, 2)


@pytest.mark.parametrize(("keys", "in_backward"), [(HOST, False), (NVME, True)], ids=str)
def test_training_is_that_of_the_written_out_model(
    tmp_path: Path, keys: dict[str, Any], in_backward: bool
) -> None:
    def run(build: Callable[[], nn.Module], **more: Any) -> tuple[list[float], dict[str, Tensor]]:
        with offload.initialize(seeded(build), config(tmp_path, keys, **more)) as engine:
            return losses_of(engine, tokens(4, 5)), states_of(engine)

    optimizer = {"lr": 3e-3, "in_backward": in_backward}
    losses, states = run(TinyLM, micro_batches=3, optimizer=optimizer)
    expected_losses, expected = run(WrittenUnevenly, optimizer=optimizer)
    assert losses == expected_losses
    assert_same_bits(states, expected)


def test_sixteen_bit_sums_are_rounded_once(tmp_path: Path) -> None:
    """Four gradients of 1, 2^-9, 2^-9, 2^-9: summed in bf16 one by one they stay 1."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.blocks[0](x)
            return result

    model = seeded(Model)
    blocks = {"groups": {"blocks": ["Block"]}}
    keys = config(tmp_path, HOST, precision="bf16", micro_batches=4, **blocks)
    with offload.initialize(model, keys) as engine:
        x = torch.tensor([[1.0], [2**-8], [2**-8], [2**-8]], dtype=torch.bfloat16, device=ON)
        model(x).sum().backward()
        found = engine.gradient(model.blocks[0].weight)
    assert found is not None
    assert found.dtype is torch.bfloat16
    assert found.item() == torch.tensor(1 + 3 * 2**-8).bfloat16().item() != 1.0


@pytest.mark.slow
def test_bytes_moved_fall_with_the_number_of_micro_batches(tmp_path: Path) -> None:
    """Weights cross once per step and not once per pass, and so do gradients."""

    def moved(count: int, **keys: Any) -> int:
        model = seeded(lambda: TinyLM(blocks=8))
        placement = NVME | {"optimizer": "host"}
        budget = {"host": "1400KiB", "nvme": "64MiB"}
        with offload.initialize(model, config(tmp_path, placement, budget=budget, **keys)) as e:
            accumulate = 4 // count
            losses_of(e, tokens(2 * accumulate, 4 * count), accumulate)
            e.settle()
            before = e.report().bytes_moved
            losses_of(e, tokens(3 * accumulate, 4 * count), accumulate)
            e.settle()
            after = e.report().bytes_moved
        return sum(after.values()) - sum(before.values())

    with_it = moved(4, micro_batches=4)
    without = moved(1, gradient_accumulation_steps=4)
    assert with_it <= 0.5 * without, (with_it, without)  # prefetching makes it vary


def test_evaluation_and_small_batches_without_gradients_work(tmp_path: Path) -> None:
    data = tokens(1, 4)[0]
    model = seeded(TinyLM)
    expected = seeded(Written).to(ON)(data[:, :-1]).detach()
    with offload.initialize(model, config(tmp_path, micro_batches=2)), torch.no_grad():
        assert torch.equal(model(data[:, :-1]), expected)
        assert model(data[:1, :-1]).shape == (1, LENGTH, VOCABULARY)


def test_a_batch_smaller_than_the_pieces_is_an_error(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with (
        offload.initialize(model, config(tmp_path, micro_batches=4)),
        pytest.raises(StateError, match="a batch of 2 cannot be split into micro_batches: 4"),
    ):
        model.loss(tokens(1, 2)[0])


def test_a_second_backward_through_the_same_graph_is_an_error(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, config(tmp_path, micro_batches=2)):
        loss = model.loss(tokens(1, 4)[0])
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


class Residual(nn.Linear):
    """A block of one group."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Looped(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


@pytest.mark.parametrize("passes", [1, 2])
def test_a_block_called_several_times_is_updated_in_backward_after_its_last_gradient(
    tmp_path: Path, passes: int
) -> None:
    data = torch.randn(4, passes, 4, WIDTH, generator=torch.Generator().manual_seed(1)).to(ON)

    def run(in_backward: bool) -> tuple[dict[str, Tensor], list[bool]]:
        optimizer = {"lr": 3e-3, "in_backward": in_backward}
        more = {"optimizer": optimizer, "gradient_accumulation_steps": passes}
        ahead = []
        with offload.initialize(seeded(Looped), split(tmp_path, "Residual", **more)) as engine:
            for step in data:
                engine.module(step[0])  # with a graph that never sees a backward
                version = engine.runtime.groups[0].version
                for x in step:
                    engine.module(x).square().sum().backward()
                ahead.append(engine.runtime.groups[0].version > version)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return states_of(engine), ahead

    states, ahead = run(in_backward=True)
    expected, _ = run(in_backward=False)
    assert_same_bits(states, expected)
    assert all(ahead)


@pytest.mark.parametrize(
    "backward",
    [lambda y, x: torch.autograd.grad(y, x), lambda y, x: y.backward(inputs=[x])],
    ids=["autograd.grad", "inputs"],
)
def test_a_backward_for_chosen_gradients_alone_is_refused(
    tmp_path: Path, backward: Callable[[Tensor, Tensor], Any]
) -> None:
    model = stack(lambda: nn.Linear(WIDTH, WIDTH))
    with offload.initialize(model, split(tmp_path, "Linear")) as engine:
        x = torch.randn(4, WIDTH, device=ON, requires_grad=True)
        y = model(x).square().sum()
        with pytest.raises(UnsupportedError, match=r"call loss\.backward\(\).*micro_batches: 1"):
            backward(y, x)
        assert not gradients_of(engine)


# ------------------------------------------------------------------------- what cannot be split
def split(folder: Path, *blocks: str, **keys: Any) -> dict[str, Any]:
    """Two pieces; `blocks` by name, since models this small would be one unit."""
    return config(folder, micro_batches=2, groups={"blocks": list(blocks)}, **keys)


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(make(), make()))


def test_batch_norm_is_refused_by_name(tmp_path: Path) -> None:
    model = stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    keys = config(tmp_path, micro_batches=2, groups={"blocks": ["Sequential"]})
    with pytest.raises(UnsupportedError, match=r"BatchNorm1d, which mixes the samples"):
        offload.initialize(model, keys)


def test_blocks_that_share_parameters_are_refused(tmp_path: Path) -> None:
    model: Any = nn.Sequential(*(Residual(WIDTH, WIDTH) for _ in range(2)))
    model[1].weight = model[0].weight
    with pytest.raises(UnsupportedError, match=r"micro_batches: 2: 0 shares parameters with"):
        offload.initialize(model, split(tmp_path, "Residual"))


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="needs repeated blocks"):
        offload.initialize(nn.Linear(4, 4), config(tmp_path, micro_batches=2))


def test_a_sequence_first_block_is_found_out(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH)  # (length, batch, width)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with (
        offload.initialize(model, config(tmp_path, micro_batches=2)),
        pytest.raises(UnsupportedError, match="first dimension is not the batch"),
    ):
        model(torch.randn(6, 4, WIDTH, device=ON))


@dataclasses.dataclass
class Rows:
    rows: Tensor


class Cache:
    """An object that a block writes to."""


class Chain(nn.Module):
    """Two linear blocks, each of which is given `other` and returns what `returned` makes."""

    class Block(nn.Linear):
        returned: Callable[[Tensor], Any]

        def forward(self, x: Tensor, other: Any = None) -> Any:  # type: ignore[override]
            return self.returned(super().forward(x))

    def __init__(self, returned: Callable[[Tensor], Any], other: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(WIDTH, WIDTH) for _ in range(2))
        self.other = other
        for block in self.blocks:
            block.returned = returned

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, self.other)
        return x


@pytest.mark.parametrize(
    ("returned", "other", "message"),
    [
        (lambda x: (x, x.sum()), None, r"cannot join an output of shape \(\)"),
        (lambda x: (x, [Rows(x)]), None, "cannot join a Rows"),
        (lambda x: (x, x.detach().sum().item()), None, "cannot join outputs that differ between"),
        (lambda x: (x, x), Cache(), "cannot split a Cache"),
    ],
)
def test_what_a_block_is_given_and_returns_is_refused_by_its_type(
    tmp_path: Path, returned: Any, other: Any, message: str
) -> None:
    with (
        offload.initialize(Chain(returned, other), split(tmp_path, "Block")) as engine,
        pytest.raises(UnsupportedError, match=message),
    ):
        engine.module(torch.randn(4, WIDTH, device=ON))


def test_a_checkpoint_around_all_pieces_is_refused(tmp_path: Path) -> None:
    model = stack(lambda: nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH, device=ON, requires_grad=True)
    with (
        offload.initialize(model, split(tmp_path, "Linear")),
        pytest.raises(UnsupportedError, match=r"activations\.checkpoint: true"),
    ):
        checkpoint(model[1][0], x, use_reentrant=False)  # type: ignore[index]


class Centred(nn.Linear):
    """In training samples are centred together, beside dropout."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y - y.mean(0) if self.training else y
        return nn.functional.dropout(y, 0.1, self.training)


def test_mixing_in_training_alone_is_found_out_beside_dropout(tmp_path: Path) -> None:
    model = nn.Sequential(Centred(WIDTH, WIDTH), Centred(WIDTH, WIDTH))
    with offload.initialize(model, split(tmp_path, "Centred")):
        x = torch.randn(5, WIDTH, device=ON)
        with pytest.raises(UnsupportedError, match="the first micro-batch depends on the second"):
            model(x)
        assert len(model.eval()(x)) == 5


# ------------------------------------------------------------------------- shapes of blocks
class Masked(nn.Module):
    """Attention under a mask, which is passed on. Whether the mask requires a gradient decides
    which kernel torch takes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.project(x)[:, None].chunk(3, -1)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            return x + mixed[:, 0], mask

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def run(self, x: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            pairs = zip(x.split(size), mask.split(size), strict=True)
            outputs = [block(*pair) for pair in pairs]
            x, mask = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        return x, mask

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x, mask = block(x, mask)
        return x, mask


def test_a_mask_that_is_passed_on_requires_no_gradient(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 40, WIDTH, generator=generator).to(ON)
    mask = torch.randn(4, 40, 40, generator=generator).to(ON)
    mask = mask.masked_fill(torch.ones(40, 40, device=ON).triu(1).bool(), -float("inf"))
    plain = seeded(Masked).to(ON)
    expected, _ = plain.run(x, mask, 2)
    expected.square().sum().backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    model = seeded(Masked)
    with offload.initialize(model, split(tmp_path, "Block")) as engine:
        output, passed_on = model(x, mask)
        output.square().sum().backward()
        assert_same_bits(gradients_of(engine), gradients)
    assert torch.equal(output, expected)
    assert torch.equal(passed_on, mask)
    assert not passed_on.requires_grad


class Shared(nn.Module):
    """Blocks of several inputs: one per sample, one that all samples share and that learns, a
    plain number; inputs and outputs in containers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, extra: dict[str, Tensor], scale: float) -> dict[str, Any]:
            y = self.linear(x) * scale + extra["bias"] + extra["per_sample"]
            return {"hidden": y.tanh(), "count": 1, "ids": torch.ones_like(x[:, 0]).long()}

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def run(self, x: Tensor, pieces: int) -> Tensor:
        extra = {"bias": self.bias * 2, "per_sample": x.mean(-1, keepdim=True)}
        for block in self.blocks:
            if pieces == 1:
                x = block(x, extra=extra, scale=0.5)["hidden"]
                continue
            outs = []
            for part, sample in zip(x.split(2), extra["per_sample"].split(2), strict=True):
                piece = {"bias": extra["bias"], "per_sample": sample}
                outs.append(block(part, extra=piece, scale=0.5)["hidden"])
            x = torch.cat(outs)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, 1)


def test_shared_and_nested_inputs_get_their_gradients(tmp_path: Path) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(ON)
    plain = seeded(Shared).to(ON)
    plain_x = x.clone().requires_grad_()
    plain.run(plain_x, 2).square().sum().backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    model = seeded(Shared)
    with offload.initialize(model, split(tmp_path, "Block")) as engine:
        ours = x.clone().requires_grad_()
        model(ours).square().sum().backward()
        found = gradients_of(engine)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, plain_x.grad, rtol=1e-5, atol=1e-6)


def test_transformers_models_train_in_pieces(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False,
    }  # fmt: skip
    data = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(3)).to(ON)

    def run(**keys: Any) -> tuple[list[float], dict[str, Tensor]]:
        model = seeded(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)))
        with offload.initialize(model, config(tmp_path, **keys)) as engine:
            losses = []
            for _ in range(4):
                loss = model(input_ids=data, labels=data).loss
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                losses.append(loss.item())
            return losses, states_of(engine)

    blocks = {"groups": {"blocks": ["LlamaDecoderLayer"]}}
    losses, states = run(micro_batches=2, **blocks)
    whole, expected = run(**blocks)
    assert losses == pytest.approx(whole, rel=1e-5)
    assert losses[-1] < losses[0]
    assert states.keys() == expected.keys()


class Table(nn.Linear):
    """Adds a table of positions to (batch, length, width): split, it would mean something else."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + table


def test_a_shared_table_as_long_as_the_batch_is_found_out_at_any_call(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Table(WIDTH, WIDTH), Table(WIDTH, WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None])
            return x

    with offload.initialize(Model(), split(tmp_path, "Table")) as engine:
        assert engine.module(torch.randn(4, 6, WIDTH, device=ON)).shape == (4, 6, WIDTH)
        with pytest.raises(UnsupportedError, match="fails on a piece of its batch"):
            engine.module(torch.randn(4, 4, WIDTH, device=ON))
