"""`offload.losses.linear_cross_entropy`: values, gradients and memory of the plain expression's."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import offload
from offload.losses import linear_cross_entropy
from offload.planning.activations.pass_watch import PassWatch
from offload.planning.activations.valueless import WithoutValues
from tests.offload.engine_cases import DEVICE, HOST, NVME, config, said_by, seeded

OPTIONS: list[dict[str, Any]] = [
    {}, {"label_smoothing": 0.1}, {"softcap": 3.0}, {"z_loss": 0.01}, {"reduction": "sum"},
    {"reduction": "none"}, {"shift": True}, {"ignore_index": 5},
    {"logit_scale": 0.3, "softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.2, "shift": True},
]  # fmt: skip
# Largest differences of the loss and of gradients, by the largest element.
BOUNDS = {torch.float64: (1e-14, 1e-14), torch.float32: (1e-6, 1e-6)}
BOUNDS |= {torch.bfloat16: (1e-6, 2**-7), torch.float16: (1e-6, 2**-10)}  # one rounding


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, logit_scale: float = 1.0,
    softcap: float | None = None, z_loss: float = 0.0, reduction: str = "mean",
    shift: bool = False,
) -> Tensor:  # fmt: skip
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits, flat = logits.flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(
        logits, flat, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction,
    )  # fmt: skip
    if z_loss:
        valid = flat != ignore_index
        squares = z_loss * logits.logsumexp(-1).square() * valid
        count = valid.sum() if reduction == "mean" else 1
        loss = loss + (squares if reduction == "none" else squares.sum() / count)
    return loss.view(labels.shape) if reduction == "none" else loss


def inputs(dtype: torch.dtype, bias: bool, *shape: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, 33), torch.randn(211, 33) * 0.2]
    tensors += [torch.randn(211)] if bias else []
    labels = torch.randint(0, 211, shape)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], labels


def results(function: Any, tensors: list[Tensor], labels: Tensor, **options: Any) -> list[Tensor]:
    """The loss, and gradients for an upstream gradient that is not 1."""
    hidden, weight, *bias = tensors
    loss = function(hidden, weight, labels, bias=bias[0] if bias else None, **options)
    upstream = torch.linspace(1, 3, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, tensors, upstream)]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_loss_and_gradients_are_those_of_whole_logits(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    for chunk, bias in ((1, False), (5, True), (1000, True)):
        tensors, labels = inputs(dtype, bias, 3, 7)
        labels[0, 3] = options.get("ignore_index", -100)
        expected = results(plain, tensors, labels, **options)
        actual = results(linear_cross_entropy, tensors, labels, chunk=chunk, **options)
        for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            bound = BOUNDS[dtype][number > 0]
            assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


def test_edges_are_those_of_torch() -> None:
    for shape in ((1,), (0,), (2, 0), (2, 1)):
        tensors, labels = inputs(torch.float32, True, *shape)
        for ignored in (labels, torch.full_like(labels, -100)):
            expected = results(plain, tensors, ignored)
            actual = results(linear_cross_entropy, tensors, ignored)
            torch.testing.assert_close(actual, expected, equal_nan=True)
    tensors, labels = inputs(torch.float16, False, 4)
    with torch.no_grad():
        loss = linear_cross_entropy(tensors[0] * 3e4, tensors[1] * 1e3, labels)
    assert not torch.isfinite(loss)  # logits beyond fp16
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(tensors[0], tensors[1], labels + 300)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}])
def test_large_logits_of_small_losses_do_not_cancel(options: dict[str, Any]) -> None:
    tensors, _ = inputs(torch.float32, True, 64)
    hidden, weight, bias = ((10 * t).detach().requires_grad_() for t in tensors)
    labels = F.linear(hidden, weight, bias).argmax(-1)  # a loss of 2e-3, of logits of 300
    given = [hidden, weight, bias]
    exact = results(plain, [t.detach().double().requires_grad_() for t in given], labels, **options)
    for ours, theirs, true in zip(
        results(linear_cross_entropy, given, labels, **options),
        results(plain, given, labels, **options), exact, strict=True,
    ):  # fmt: skip
        largest = true.abs().max()
        assert (ours - true).abs().max() <= 1.2 * (theirs - true).abs().max() + 1e-6 * largest


def test_a_frozen_head_or_input_gets_no_gradient_and_a_graph_may_be_kept() -> None:
    tensors, labels = inputs(torch.float32, True, 9)
    expected = results(plain, tensors, labels)[1:]
    for trained in ((0,), (1,), (2,), (0, 2)):
        some = [t.detach().requires_grad_(i in trained) for i, t in enumerate(tensors)]
        loss = linear_cross_entropy(some[0], some[1], labels, bias=some[2])
        for _ in range(2):
            loss.backward(torch.tensor(0.5), retain_graph=True)
        for index, tensor in enumerate(some):
            assert (tensor.grad is not None) == (index in trained)
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad, expected[index])


def test_products_in_fp32_are_added_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose `torch.mm` gives fp32 for matrices of 16 bits."""
    tensors, labels = inputs(torch.bfloat16, True, 40)
    expected = results(linear_cross_entropy, tensors, labels, chunk=4)
    own = torch.mm

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **more: Any) -> Tensor:
        return own(a, b, **more) if out_dtype is None else own(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    module = sys.modules["offload.losses.linear_cross_entropy"]
    monkeypatch.setattr(module, "_sums_in_fp32", lambda tensor: True)
    for ours, theirs in zip(
        results(linear_cross_entropy, tensors, labels, chunk=4), expected, strict=True
    ):
        assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels are \(4,\)"),
        ({"labels": torch.zeros(3)}, "labels are torch.float32"),
        ({"labels": torch.zeros(3, dtype=torch.int64, device="meta")}, "labels is on meta"),
        ({"head_weight": torch.zeros(7, 4)}, r"head_weight \(7, 4\)"),
        ({"head_weight": torch.zeros(7, 5).bfloat16()}, "head_weight is torch.bfloat16"),
        ({"hidden": torch.zeros(3, 5, dtype=torch.int64)}, "hidden is torch.int64"),
        ({"bias": torch.zeros(6)}, r"bias is \(6,\)"),
        ({"reduction": "median"}, "reduction='median'"),
        ({"chunk": 0}, "chunk=0"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
        ({"softcap": 0.0}, "softcap=0.0"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    given = {
        "hidden": torch.zeros(3, 5), "head_weight": torch.zeros(7, 5),
        "labels": torch.zeros(3, dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        linear_cross_entropy(**{**given, **change})


class Tied(nn.Module):
    """A head tied to the embedding, whose weight is used outside of its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(997, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 997, bias=False)
        self.head.weight = self.embed.weight
        self.loss: Any = partial(linear_cross_entropy, chunk=3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss: Tensor = checkpoint(self.loss, x, self.head.weight, tokens, use_reentrant=False)
        return loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_head_in_tiers_gives_the_same_bits_and_is_read_no_oftener(
    tmp_path: Path, precision: str
) -> None:
    tokens = torch.arange(24).view(2, 12)

    def trained(placement: Any, loss: Any = None) -> tuple[list[Tensor], int]:
        model = seeded(Tied)
        model.loss = loss or model.loss
        settings = config(tmp_path, placement, precision=precision, optimizer={"chunk": 4096})
        if placement == NVME:  # no room for copies of all
            room = "1100KiB" if precision == "fp32" else "700KiB"
            settings |= {"prefetch": 0, "budget": {**settings["budget"], "host": room}}
        with offload.initialize(model, settings) as engine:
            for _ in range(3):
                for _ in range(2 if precision == "fp32" else 1):
                    model(tokens).backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            with torch.no_grad():
                own = linear_cross_entropy(model.embed(tokens), model.head.weight, tokens)
            moved = engine.report().bytes_moved
            values = [model(tokens).detach(), own, *map(Tensor.clone, model.state_dict().values())]
        return values, moved["nvme read"]

    (expected, _), (on_host, _), (on_nvme, read) = map(trained, (DEVICE, HOST, NVME))
    assert all(map(torch.equal, expected, on_host))
    assert all(map(torch.equal, expected, on_nvme))
    # the head has nine tenths of the bytes, and 8 parts; what is evicted depends on time, too
    assert 0 < read <= 1.5 * trained(NVME, plain)[1]


@pytest.mark.parametrize("tokens", [16 * 1024, 128 * 1024])
def test_a_pass_of_128k_entries_takes_one_part_and_the_gradients(tokens: int) -> None:
    """Of many tokens the gradient of hidden is larger than a part: a sum in fp32, rounded."""
    values, watch = WithoutValues(), PassWatch()
    vocab, width = 128256, 4096
    with values:
        hidden = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, width, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.int64)
    with values, watch:
        watch.begin()
        linear_cross_entropy(hidden, weight, labels).backward()
    assert watch.peak.nbytes <= 1.2 * max(4 * 1024 * vocab, 6 * hidden.numel()) + 2 * weight.numel()
    assert watch.backward.operations < 10_000  # parts of many columns


CHILD = """
import torch
from offload.losses import linear_cross_entropy
from offload.process import machine
hidden, weight = (torch.randn(n, 256, requires_grad=True) for n in (4096, 32000))
linear_cross_entropy(hidden[:64], weight, torch.arange(64)).backward()
hidden.grad = weight.grad = None
machine.trim_memory()
before = machine.rss_nbytes()
linear_cross_entropy(hidden, weight, torch.arange(4096)).backward()
print(machine.peak_rss_nbytes() - before)
"""


def test_a_pass_in_a_process_of_its_own_stays_below_its_bound() -> None:
    chunk, gradients = 4 * 1024 * 32000, 4 * 256 * (32000 + 4096)  # whole logits take 4 chunks
    assert said_by(CHILD) <= 1.2 * chunk + gradients
