"""What engine tests compare: losses, parameters, gradients and optimizer states, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

import offload


def parameters_of(engine: offload.Engine) -> dict[str, Tensor]:
    """Copies of all parameters, by name."""
    with engine.gathered():
        named = engine.module.named_parameters()
        return {name: param.detach().clone() for name, param in named}


def states_of(engine: offload.Engine) -> dict[str, Tensor]:
    """Parameters, masters, moments and step counts, by name."""
    states = parameters_of(engine)
    for name, param in engine.module.named_parameters():
        if engine.store.group_of(param) is not None:
            state = engine.values.read_state(param)
            states.update({f"{name} {key}": value for key, value in state.items()})
    return states


def gradients_of(engine: offload.Engine) -> dict[str, Tensor]:
    """Copies of the accumulated gradients, by name."""
    gradients = {n: engine.gradient(p) for n, p in engine.module.named_parameters()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def assert_scheduler_is_saved(engine: offload.Engine) -> None:
    """The saved checkpoint has the scheduler: no warning was given that it is left out."""
    assert engine.optimizer.has_scheduler
    assert not engine._told_of_scheduler


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors are not equal bit for bit, and names that only one side has."""
    common = a.keys() & b.keys()
    return sorted(
        (a.keys() ^ b.keys()) | {name for name in common if bits(a[name]) != bits(b[name])}
    )


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    names = differing(a, b)
    assert not names, f"{len(names)} of {len(a)} differ: {names[:6]}"


def train_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Backward of a loss, a step and zeroed gradients; the loss's value."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def losses_of(
    engine: offload.Engine,
    data: Sequence[Tensor],
    accumulate: int = 1,
    loss_of: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> list[float]:
    """Train on `data`, a step after every `accumulate` batches; the loss of each batch."""
    losses = []
    for number, tokens in enumerate(data, 1):
        loss = loss_of(engine.module, tokens) if loss_of else engine.module.loss(tokens)  # type: ignore[operator]
        engine.backward(loss / accumulate)
        losses.append(loss.item())
        if number % accumulate == 0:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return losses
