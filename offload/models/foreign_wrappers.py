"""Wrapping an engine's model in a class that moves parameters or averages gradients is an error.

DistributedDataParallel broadcasts and reduces parameters without fetching them: ranks issue
collectives of different sizes, and the processes abort. Hooks of accelerate keep weights of their
own, which they put in the place of the model's.
"""

import functools
import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from offload.tiers import accelerator
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.store import WeightStore

# by name: some of them are never imported
_WRAPPERS = frozenset({
    "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine",
    "FSDPModule",  # `fully_shard` puts it among the bases of a module's class
})  # fmt: skip
CHECKPOINTS_ON_CPU = (
    "gradient checkpointing with offload=True keeps its tensors in pinned memory, outside of all "
    "budgets (and fails without a GPU); leave offload=True out, and set placement.activations: "
    "{checkpoint: true, tier: host} in the offload configuration (tier: nvme without a GPU)"
)


def refuse_wrapped(model: nn.Module) -> None:
    """Raise UnsupportedError if there is a wrapper around the model or a part, or such a hook."""
    for name, module in model.named_modules():
        if _moves_parameters(module):
            _refuse(module)
        if _has_moving_hooks(module):
            raise UnsupportedError(
                f"{name or type(module).__name__} has a hook of accelerate that moves weights "
                "(device_map=, cpu_offload, disk_offload, casts by layer), and offload does that "
                "here: load the model without, or take the hooks off first, with "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
            )


def refuse_checkpoints_on_cpu(model: nn.Module) -> None:
    """Raise UnsupportedError for gradient checkpointing whose function uses `save_on_cpu`, as in
    transformers' `gradient_checkpointing_enable(offload=True)`."""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)  # a partial, mostly
        code = getattr(getattr(function, "func", function), "__code__", None)
        if "save_on_cpu" in getattr(code, "co_names", ()):
            raise UnsupportedError(CHECKPOINTS_ON_CPU)


def refuse_foreign_wrappers(store: WeightStore) -> None:
    """Refuse wrappers around the store's model until it is closed."""
    _listen()
    _watched.add(store)


def _check(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if not _watched or module is None or not _moves_parameters(parent):
        return
    for store in list(_watched):
        known = (store.spec_of(p) is not None for p in module.parameters())
        if store.unusable is None and any(known):
            _refuse(parent)


# One hook for all models, for good: the garbage collector would take one for each away amid torch's
# own iteration over all hooks.
_watched: weakref.WeakSet[WeightStore] = weakref.WeakSet()
_listen = functools.cache(lambda: register_module_module_registration_hook(_check))


def _moves_parameters(module: Any) -> bool:
    names = {kind.__name__ for kind in type(module).__mro__}
    # DataParallel does nothing but call the model where there is one device, or none
    return bool(names & _WRAPPERS) or ("DataParallel" in names and accelerator.device_count() > 1)


def _has_moving_hooks(module: nn.Module) -> bool:
    """Return whether a hook moves weights, not only inputs or the model as a whole."""
    hook = getattr(module, "_hf_hook", None)
    return any(
        getattr(each, "offload", False) is True or type(each).__name__ == "LayerwiseCastingHook"
        for each in (hook, *getattr(hook, "hooks", ()))  # of a SequentialHook
    )


def _refuse(wrapper: nn.Module) -> None:
    raise UnsupportedError(
        f"{type(wrapper).__name__} around a model that trains through an offload engine: the "
        "engine's ranks gather parameters and average gradients themselves; use the model as it "
        "is, without wrapper and without fully_shard (accelerate: prepare the optimizer and the "
        "loader, not the model; transformers: OffloadTrainer instead of Trainer)"
    )
