"""Chunked losses of transformers' causal language models: `loss: {chunked: true}`.

Such a model computes `logits = lm_head(hidden)`, perhaps scales or caps them, and then
`self.loss_function(logits, labels, ...)`. While it trains and has labels, the head hands over its
input in place of logits, and the loss function takes it to `linear_cross_entropy`:

    model      a hook notes whether the call trains and has labels
    lm_head    returns WithheldLogits, which hold its input, and note a scale and a cap
    loss       calls lm_head again with labels: so its weight is fetched as always

No forward is replaced but the head's, and transformers is not imported. Whatever else is done with
withheld logits is a ConfigError: no loss is ever a different one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from offload.losses.linear_cross_entropy import linear_cross_entropy
from offload.tiers.errors import ConfigError

_LOSSES = "transformers.loss.loss_utils"
_OFF = "set loss.chunked: false"


class WithheldLogits:
    """Logits that are never made: the head, its input, and what the model did to them since.

    A model may multiply them, divide them by numbers, take `tanh` and turn them into fp32. Any
    other use raises ConfigError, and so does every use after the loss.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor) -> None:
        self._head = head
        self._hidden: Tensor | None = hidden
        self._inner = 1.0  # outer * tanh(inner * logits) where there is a tanh
        self._outer: float | None = None
        self.device, self.dtype = hidden.device, torch.float32
        self.shape = torch.Size((*hidden.shape[:-1], head.out_features))

    def loss(self, labels: Tensor, *, shift: bool, ignore_index: int, reduction: str) -> Tensor:
        """Return the loss in fp32, and forget the head's input."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            self._refuse("a second loss")
        outer = self._outer
        options: dict[str, Any] = {
            "shift": shift, "ignore_index": ignore_index, "reduction": reduction, "softcap": outer,
            "logit_scale": self._inner * (1.0 if outer is None else outer),
        }  # fmt: skip
        return cast(Tensor, self._head(_Loss(hidden, labels, options))["loss"])

    def _scaled(self, factor: Any) -> WithheldLogits:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            self._refuse(f"a product with a {type(factor).__name__}")
        if self._hidden is None:
            self._refuse("a product")
        scaled = WithheldLogits(self._head, self._hidden)
        scaled._inner, scaled._outer = self._inner, self._outer
        if scaled._outer is None:
            scaled._inner *= factor
        else:
            scaled._outer *= factor
        return scaled

    def __mul__(self, factor: Any) -> WithheldLogits:
        return self._scaled(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> WithheldLogits:
        is_number = isinstance(divisor, (int, float)) and divisor != 0
        return self._scaled(1 / divisor if is_number else divisor)

    def tanh(self) -> WithheldLogits:
        """Return these logits, capped."""
        if self._outer is not None:
            self._refuse("a second tanh")
        capped = self._scaled(1.0)
        capped._outer = 1.0
        return capped

    def float(self) -> WithheldLogits:
        """Return these logits: the loss is computed in fp32 anyway."""
        return self

    def contiguous(self) -> WithheldLogits:
        """Return these logits: what is never made has no strides."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> WithheldLogits:
        """Return these logits, unless they would get another device or a narrower format."""
        for asked in (*args, *kwargs.values()):
            if asked not in (torch.float32, self.device, str(self.device)):
                self._refuse(f"to({asked})")
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> WithheldLogits:
        if function is not torch.tanh or not isinstance(args[0], cls):
            cls._refuse(getattr(function, "__name__", str(function)))
        return args[0].tanh()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(name)

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise ConfigError(
            "loss.chunked: true, so a model that trains and has labels makes no logits, and "
            f"{what} needs them (between head and loss they may be scaled by numbers and capped by "
            "tanh). For logits call model.eval(), or leave labels out; if the model itself or its "
            f"trainer uses those of training batches, {_OFF}"
        )


def _refused(name: str) -> Callable[..., NoReturn]:
    return lambda self, *_: self._refuse(name)


# those that Python looks up in the class alone
for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__abs__", "__imul__", "__itruediv__",
    "__pow__", "__matmul__", "__iter__", "__bool__", "__len__", "__getitem__", "__setitem__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
):  # fmt: skip
    setattr(WithheldLogits, _name, _refused(_name))


@dataclass(frozen=True)
class _Loss:
    """The arguments of a loss, which a head is called with."""

    hidden: Tensor
    labels: Tensor
    options: dict[str, Any]


class _Head:
    """The forward of a head, which may return withheld logits or a loss."""

    def __init__(self, owner: ChunkedLoss, head: nn.Linear) -> None:
        self._owner = owner
        self._head = head
        self._own: Callable[[Tensor], Tensor] = head.forward

    def __call__(self, given: Any) -> Any:
        head = self._head
        if isinstance(given, _Loss):
            loss = linear_cross_entropy(
                given.hidden, head.weight, given.labels, bias=head.bias, **given.options
            )
            return {"loss": loss}  # a hook on all modules takes no tensor here for logits
        if not self._owner.withholds:
            return self._own(given)
        _check_hooks(head, "the head")
        return WithheldLogits(head, given)


class ChunkedLoss:
    """The chunked loss of one model, until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        """Raise ConfigError for a model that has no plain cross-entropy of a linear head."""
        name = type(model).__name__
        owner: Any = next((each for each in model.modules() if _has_a_head(each)), None)
        if owner is None:
            raise ConfigError(
                f"loss.chunked: {name} is no causal language model of transformers with a head of "
                "its own; offload.losses.linear_cross_entropy is for losses that you write, and "
                f"`offload train` computes its own so; {_OFF}"
            )
        heads = _heads_of(owner)
        losses: Any = sys.modules.get(_LOSSES)
        self._plain: Callable[..., Tensor] = owner.loss_function
        if losses is None or self._plain is not losses.ForCausalLMLoss:
            raise ConfigError(
                f"loss.chunked: the loss of {name} is {getattr(self._plain, '__name__', '?')}, "
                f"and only transformers' ForCausalLMLoss is made in chunks; {_OFF}"
            )
        self.withholds = False
        self._loss_type = getattr(owner, "loss_type", None)
        self._signature = inspect.signature(type(owner).forward)
        self._undo = ExitStack()
        for head in heads:
            self._undo.callback(vars(head).pop, "forward")
            vars(head)["forward"] = _Head(self, head)
        before = vars(owner).get("_loss_function")
        self._undo.callback(lambda: before and vars(owner).update(_loss_function=before))
        self._undo.callback(vars(owner).pop, "_loss_function")
        owner.loss_function = self._loss
        for hook in (
            owner.register_forward_pre_hook(self._begin, with_kwargs=True),
            owner.register_forward_hook(self._end, always_call=True),
        ):
            self._undo.callback(hook.remove)

    def remove(self) -> None:
        """Give the model its own head and loss back."""
        self._undo.close()

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        asked = getattr(model, "loss_type", None)  # its loss_function no longer looks there
        if asked != self._loss_type:
            raise ConfigError(f"loss.chunked: loss_type has become {asked}; {_OFF}")
        labels = kwargs.get("labels")
        if args and labels is None:
            labels = self._signature.bind_partial(model, *args).arguments.get("labels")
        self.withholds = model.training and labels is not None

    def _end(self, *_: Any) -> None:
        self.withholds = False

    def _loss(
        self, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return the loss as transformers' ForCausalLMLoss does."""
        if not isinstance(logits, WithheldLogits):
            return self._plain(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        if logits.shape[-1] != vocab_size:
            raise ConfigError(
                f"the head gives {logits.shape[-1]} logits, and the model's loss takes {vocab_size}"
            )
        targets = labels if shift_labels is None else shift_labels.view(logits.shape[:-1])
        loss = logits.loss(
            targets.to(logits.device), shift=shift_labels is None, ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )  # fmt: skip
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _has_a_head(module: Any) -> bool:
    kind = type(module)  # an adapter's wrapper has its model's attributes, too
    if not (hasattr(kind, "loss_function") and hasattr(kind, "get_output_embeddings")):
        return False
    return module.get_output_embeddings() is not None


def _heads_of(model: Any) -> list[nn.Linear]:
    """Return the linear layers that may be a model's head: PEFT's `modules_to_save` keep two."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    heads = [head]
    if isinstance(copies, nn.ModuleDict) and hasattr(head, "original_module"):
        heads = [head.original_module, *copies.values()]
    for each in heads:
        if type(each) is not nn.Linear:
            raise ConfigError(
                f"loss.chunked: the head of {type(model).__name__} is a "
                f"{type(each).__module__}.{type(each).__name__}, and only that of an nn.Linear is "
                f"made in chunks (with adapters: leave the head out, or save it whole); {_OFF}"
            )
        _check_hooks(each, f"the head of {type(model).__name__}", own="forward" not in vars(each))
    return heads


def _check_hooks(head: nn.Linear, name: str, *, own: bool = True) -> None:
    """Raise ConfigError for a head whose logits or gradients other code sees, or makes."""
    hooks = *head._forward_hooks.values(), *head._backward_hooks.values()
    hooks += (*head._backward_pre_hooks.values(),)
    if not own or not all(getattr(hook, "__module__", "").startswith("offload.") for hook in hooks):
        raise ConfigError(
            f"loss.chunked: {name} has hooks or a forward of other code, which would see no "
            f"logits; {_OFF}"
        )
