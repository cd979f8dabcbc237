"""Refuses what cannot follow parameters that move: transforms of torch.func and forward-mode AD,
whose wrapped tensors have no storage that a handle could name, and under which autograd's hooks for
saved tensors do not work; and a device's graphs (CUDA graphs), which replay kernels with the
addresses they had, where fetching changes addresses and waits in threads."""

import torch
from torch.autograd import forward_ad

from offload.tiers import accelerator
from offload.tiers.errors import UnsupportedError

_HARMLESS = "Vmap"  # nothing is differentiated
_REFUSED = (
    "torch.func or forward-mode AD through %s: it ignores hooks for saved tensors, through which "
    "backward fetches parameters; use backward(), torch.autograd.grad or torch.autograd.functional "
    "(jvp, vjp, jacobian, hessian) without forward-mode strategy; for single parameters give it "
    "parameter.detach().clone(), or call it within engine.gathered(parameter)"
)


def in_transform() -> bool:
    """Return whether a call in progress is transformed by torch.func or forward-mode AD."""
    return bool(torch._C._functorch.get_interpreter_stack()) or forward_ad._current_level >= 0


def refuse_transforms() -> None:
    """Raise UnsupportedError if anything but autograd's graph differentiates a call in progress."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    differentiated = any(not str(each.key()).endswith(_HARMLESS) for each in stack)
    if differentiated or forward_ad._current_level >= 0:
        raise UnsupportedError(_REFUSED % "a model whose parameters are offloaded")


def refuse_in_transforms(param: str) -> None:
    """Raise UnsupportedError if an operation on a parameter, outside of its module, is
    differentiated by anything but autograd's graph."""
    # not its stack: the transform has taken itself off when its operation comes to the tensors
    hooks_work = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if not hooks_work or forward_ad._current_level >= 0:
        raise UnsupportedError(_REFUSED % f"an operation on {param}, which is offloaded")


def refuse_capture(device: torch.device) -> None:
    """Raise UnsupportedError if this thread's stream of `device` is recording a graph."""
    if accelerator.is_capturing(device):
        raise UnsupportedError(
            f"a {accelerator.of(device).title} graph is being captured (torch.cuda.graph, "
            "torch.cuda.make_graphed_callables) while an offloaded model is called: its parameters "
            "have another address at each use, and are waited for by threads, which a graph cannot "
            "replay; leave this model's forward, backward and step out of the graph, and capture "
            "parts without parameters alone; torch.compile(model) saves launches, too"
        )
