"""The way a model is called for one pass, if the caller does not specify it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.planning.plan.workload import Workload
from offload.tiers.errors import UnsupportedError

# Calls the model on inputs of its own making; gives the loss.
Run = Callable[[nn.Module, Workload], Tensor]


def default_run(model: nn.Module) -> Run:
    """Choose inputs by the names of forward's parameters, or raise UnsupportedError."""
    names = inspect.signature(model.forward).parameters.keys()
    if {"tokens", "targets"} <= names:
        return _run_on_tokens
    if {"input_ids", "labels"} <= names:
        more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
        return partial(_run_on_input_ids, more=more)
    raise UnsupportedError(
        f"{type(model).__name__}.forward takes {', '.join(sorted(names)) or 'nothing'}: what to "
        "call it with is known for language models alone, which take input_ids and labels (or "
        "tokens and targets); give a function run(model, workload) that calls it and returns the "
        "loss"
    )


def forward_run(model: nn.Module) -> Run:
    """Like `default_run`, for a generating pass. The run returns the logits of each sequence's last
    token, or of all tokens if the model cannot omit the others. Nothing is cached."""
    names = inspect.signature(model.forward).parameters.keys()
    if "decoder_input_ids" in names:
        raise UnsupportedError(
            f"{type(model).__name__} has an encoder and a decoder: what generating takes is "
            "predicted for models of one stack alone"
        )
    if "tokens" in names:
        return _logits_of_tokens
    if "input_ids" in names:
        more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
        if "logits_to_keep" in names:
            more["logits_to_keep"] = 1
        return partial(_logits_of_input_ids, more=more)
    raise UnsupportedError(
        f"{type(model).__name__}.forward takes {', '.join(sorted(names)) or 'nothing'}: what to "
        "call it with is known for language models alone, which take input_ids (or tokens)"
    )


def _logits_of_tokens(model: nn.Module, workload: Workload) -> Tensor:
    logits: Tensor = model(_tokens(workload)).logits
    return logits


def _logits_of_input_ids(model: nn.Module, workload: Workload, more: dict[str, Any]) -> Tensor:
    logits: Tensor = model(input_ids=_tokens(workload), **more).logits
    return logits


def _run_on_tokens(model: nn.Module, workload: Workload) -> Tensor:
    loss: Tensor = model(_tokens(workload), _tokens(workload)).loss
    return loss


def _run_on_input_ids(model: nn.Module, workload: Workload, more: dict[str, Any]) -> Tensor:
    loss: Tensor = model(input_ids=_tokens(workload), labels=_tokens(workload), **more).loss
    return loss


def _tokens(workload: Workload) -> Tensor:
    return torch.zeros(workload.batch, workload.sequence, dtype=torch.long)
