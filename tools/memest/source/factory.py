"""`module:function`: a user's function that returns an nn.Module.

This is the only kind of source whose code runs, since the user named it. It is built under
`torch.device("meta")`: a model of any size takes no memory. Its output goes to stderr: standard
output is for the answer.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from typing import TYPE_CHECKING, Any

from offload.tiers.errors import ConfigError
from offload.tools.memest.source.input_files import one_line

if TYPE_CHECKING:
    from torch import nn

_NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


def is_named(source: str) -> bool:
    """Whether `source` has the form `module:function`."""
    return _NAMED.fullmatch(source) is not None


def build_named(source: str) -> nn.Module:
    """Import the module, and call the function without arguments, on the meta device.

    Modules of the current folder are found as well. Raise ConfigError, naming the reason, unless
    it returns an nn.Module whose parameters are all on meta.
    """
    function = _imported(source)
    import torch

    try:
        with torch.device("meta"), contextlib.redirect_stdout(sys.stderr):
            model = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source}: the function failed: {one_line(error)}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"{source}: returned {type(model).__name__}, not an nn.Module"
            + ("; name the function that builds it" if model is None else "")
        )
    real = [(name, param) for name, param in model.named_parameters() if not param.is_meta]
    if real:
        name, param = real[0]
        raise ConfigError(
            f"{source}: {len(real)} parameters have real memory, the first is {name} on "
            f"{param.device}; build without loading weights and without naming a device"
        )
    return model


def _imported(source: str) -> Any:
    module_name, _, attributes = source.partition(":")
    if "" not in sys.path:  # the path of a console script does not begin with the current folder
        sys.path.insert(0, "")
    with contextlib.redirect_stdout(sys.stderr):
        try:
            target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{source}: no module named {error.name!r}; run memest where it can be imported"
            ) from None
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{source}: importing it failed: {one_line(error)}") from error
    for name in attributes.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            raise ConfigError(f"{source}: {module_name} has no {attributes}") from None
    if not callable(target):
        raise ConfigError(f"{source}: is {type(target).__name__}, not a function")
    return target
