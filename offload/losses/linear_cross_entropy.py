"""Cross-entropy of a linear layer's outputs, made a part at a time.

Logits are the largest tensor of a language model's pass: 16 x 1,024 tokens with 128,256 entries
take 8.4 GB in fp32, and cross-entropy keeps another two of that size.

    forward    rows:     some tokens, all entries    -> each token's loss, maximum and sum of exp
    backward   columns:  all tokens, some entries    -> these rows of the head's gradient, complete,
                                                        and a part of the gradient of hidden

Backward computes the logits again, which makes four products of three: gradients made in forward
would stay in memory, one of the head for each pass, and be rounded before a loss scale is known.
With columns each element of the head's gradient is one product, which is rounded once as in
`F.linear`; the fp32 sum that remains is of hidden's size, not of the head's.

torch 2.13's `F.linear_cross_entropy` has neither label smoothing, soft-capping nor z-loss in parts,
makes gradients in forward, and adds 16-bit gradients of the head up in 16 bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import handle_torch_function, has_torch_function

from offload.tiers.accelerator import is_accelerator

_CHUNK = 1024  # tokens, and more where these take less than _MIN_NBYTES
_MIN_NBYTES = 64 << 20
_ALIGNED = 64  # columns, for matrix units
Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    shift: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross-entropy of `F.linear(hidden, head_weight, bias)` against `labels`, in fp32
    (fp64 for fp64), without ever having all logits.

        logits = F.linear(hidden, head_weight, bias).float() * logit_scale
        logits = softcap * torch.tanh(logits / softcap)  # if there is a softcap
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index,
                               label_smoothing=label_smoothing, reduction=reduction)

    and, with `z_loss`, that number times the squared log-sum-exp of a token's logits, reduced in
    the same way. In fp32, value and gradients differ from these by 1e-6 of their largest element;
    in 16 bits gradients are rounded once, as there. Logits have the format of `hidden`, so those
    beyond fp16's range are infinite, and the loss is NaN.

    `hidden` is (..., H), `head_weight` (V, H), `bias` (V), `labels` int64 of hidden's leading
    shape. With `shift` the label of a token is the next one of its sequence (the last dimension of
    `labels`), and the last token has none. Of labels that are `ignore_index` a mean is NaN, as in
    torch; `none` gives one loss for each label, 0 where ignored.

    Parts take at most as many bytes as the fp32 logits of `chunk` tokens (by default 1,024, or as
    many as take 64 MiB), in backward with the fp32 sum for hidden (unless that leaves less than a
    quarter, or an eighth of that sum), and beside them there are the gradients alone. Results
    depend on `chunk` by rounding.
    Under autocast, hidden and head are cast as `F.linear` casts them. The head may be a parameter
    in tiers: its values stay for all parts.

    Raises ValueError for shapes, devices, formats or numbers that do not fit together. There is no
    second derivative.
    """
    tensors = hidden, head_weight, labels, bias
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(
            linear_cross_entropy, tensors, hidden, head_weight, labels, bias=bias,
            ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale,
            softcap=softcap, z_loss=z_loss, reduction=reduction, shift=shift, chunk=chunk,
        )  # fmt: skip
        return result
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, head_weight = hidden.to(dtype), head_weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _check(hidden, head_weight, labels, bias)
    if chunk is None:
        chunk = max(_CHUNK, _MIN_NBYTES // (4 * max(1, len(head_weight))))
    options = Options(ignore_index, label_smoothing, logit_scale, softcap, z_loss, chunk)
    options.check(reduction)
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(kind, enabled=False):
        losses: Tensor = _Losses.apply(rows, head_weight, bias, labels.reshape(-1), options)
        if reduction == "none":
            return losses.view(labels.shape)
        total = losses.sum()
        return total if reduction == "sum" else total / (labels != ignore_index).sum()


@dataclass(frozen=True)
class Options:
    """The numbers of a loss; see `linear_cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    logit_scale: float
    softcap: float | None
    z_loss: float
    chunk: int

    def check(self, reduction: str) -> None:
        """Raise ValueError for numbers that mean nothing."""
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction={reduction!r}: expected one of mean, sum, none")
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: expected at least 1 token")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected 0 to 1")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap}: expected a number above 0, or None")

    def parts(self, hidden: Tensor, vocab: int, *, columns: bool) -> Iterator[slice]:
        """Yield slices of the tokens, or of the vocabulary, whose logits take no more bytes with
        what is made of them than the fp32 logits of `chunk` tokens."""
        room = 4 * self.chunk * vocab
        each = 4 if self.softcap is None else 8  # bytes per logit, in fp32; and for its slope
        length, other = (vocab, len(hidden)) if columns else (len(hidden), vocab)
        if hidden.itemsize < 4:
            each += hidden.itemsize
            if columns:
                other += hidden.shape[1]  # the head's rows in fp32, and the sum for hidden
                of_hidden = 4 * hidden.numel()
                room = max(room // 4, room - of_hidden, of_hidden // 8)  # few columns are slow
        size = max(1, room // (each * max(1, other)))
        if columns and size > _ALIGNED:
            size -= size % _ALIGNED
        return (slice(at, min(at + size, length)) for at in range(0, length, size))

    def capped_(self, logits: Tensor) -> Tensor:
        """Scale and cap fp32 logits, in place."""
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | None:
        """The derivative of `capped_`, by what it has returned, less the scale; None for 1."""
        if self.softcap is None:
            return None
        return logits.div(self.softcap).square_().neg_().add_(1.0)


class _Losses(torch.autograd.Function):
    """Each token's loss; 0 for those without a label."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, of: Options
    ) -> Tensor:
        vocab = len(weight)
        valid = labels != of.ignore_index
        labels = labels.where(valid, 0)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        tops, sums, losses = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(3))
        for rows in of.parts(hidden, vocab, columns=False):
            logits = of.capped_(_logits(hidden[rows], weight, bias))
            tops[rows] = logits.amax(1)
            logits.sub_(tops[rows, None])  # all else is of these: large ones would cancel
            loss = logits.gather(1, labels[rows, None])[:, 0].mul_(of.label_smoothing - 1.0)
            if of.label_smoothing:
                loss -= of.label_smoothing * logits.mean(1)
            sums[rows] = logits.exp_().sum(1)
            del logits  # before the next ones are made
            torch.add(loss, sums[rows].log(), out=losses[rows])
        if of.z_loss:
            losses += of.z_loss * (tops + sums.log()).square()
        ctx.of = of
        ctx.save_for_backward(hidden, weight, bias, labels, valid, tops, sums)
        return losses.where(valid, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        hidden, weight, bias, labels, valid, tops, sums = ctx.saved_tensors
        of: Options = ctx.of
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        scales = upstream.where(valid, 0.0).mul_(of.logit_scale)[:, None]
        gradients = _Gradients(
            hidden, weight,
            torch.zeros_like(hidden, dtype=sums.dtype) if wants_hidden else None,
            torch.empty_like(weight) if wants_weight else None,
        )  # fmt: skip
        of_bias = torch.empty_like(bias) if wants_bias else None
        factors = scales / sums[:, None]
        if of.z_loss:
            factors *= 1 + 2 * of.z_loss * (tops + sums.log())[:, None]
        for columns in of.parts(hidden, len(weight), columns=True):
            own = None if bias is None else bias[columns]
            logits = of.capped_(_logits(hidden, weight[columns], own))
            slope = of.slope(logits)
            logits.sub_(tops[:, None]).exp_().mul_(factors)
            if of.label_smoothing:
                logits -= scales * (of.label_smoothing / len(weight))
            _subtract_at(logits, labels[:, None] - columns.start, scales * (1 - of.label_smoothing))
            if slope is not None:
                logits.mul_(slope)
                del slope
            if of_bias is not None:
                of_bias[columns] = logits.sum(0)
            gradients.add(logits, columns)
            del logits
        of_hidden = None if gradients.hidden is None else gradients.hidden.to(hidden.dtype)
        return of_hidden, gradients.weight, of_bias, None, None


@dataclass(frozen=True)
class _Gradients:
    """The gradients of hidden (in fp32) and of the head, while columns come."""

    rows: Tensor
    head: Tensor
    hidden: Tensor | None
    weight: Tensor | None

    def add(self, logits: Tensor, columns: slice) -> None:
        """Take in the gradient of some columns of the logits."""
        rounded = logits.to(self.rows.dtype)
        if self.weight is not None:
            torch.mm(rounded.t(), self.rows, out=self.weight[columns])
        if self.hidden is None:
            return
        head = self.head[columns]
        if rounded is logits:
            self.hidden.addmm_(logits, head)
        elif _sums_in_fp32(logits):
            for at in range(0, len(rounded), len(head)):  # products no larger than head in fp32
                rows = slice(at, at + len(head))
                self.hidden[rows] += torch.mm(rounded[rows], head, out_dtype=torch.float32)
        else:
            del rounded
            self.hidden.addmm_(logits, head.float())


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits as `F.linear` gives them, in fp32 (fp64 for fp64)."""
    logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _subtract_at(logits: Tensor, places: Tensor, values: Tensor) -> None:
    """Subtract each row's value at its place, where that is one of the columns."""
    inside = (places >= 0) & (places < logits.shape[1])
    places = places.where(inside, 0)
    changed = logits.gather(1, places).sub_(values.where(inside, 0.0))
    logits.scatter_(1, places, changed)  # one place for each row: in any order the same


def _sums_in_fp32(tensor: Tensor) -> bool:
    """Whether 16-bit matrices can be multiplied into fp32 there; on a CPU they cannot."""
    return is_accelerator(tensor.device) and torch.version.hip is None


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError, naming the tensors, if they do not fit together."""
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and head_weight {tuple(weight.shape)}: expected "
            "(..., H) and (V, H)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels are {tuple(labels.shape)}, and hidden is {tuple(hidden.shape)}: expected "
            f"{tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}: expected {tuple(weight.shape[:1])}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}: expected torch.int64")
    if not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype}: expected a floating point format")
    others = {"head_weight": weight, "bias": bias, "labels": labels}
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != hidden.dtype and name != "labels":
            raise ValueError(f"{name} is {tensor.dtype}, and hidden {hidden.dtype}")
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, and hidden on {hidden.device}")
