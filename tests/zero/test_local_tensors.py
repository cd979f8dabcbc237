"""What is no DTensor is told without importing DTensors, also while another thread does so."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from offload.zero.tensors.local_tensors import is_dtensor


class Named(torch.Tensor):
    """No plain tensor, so it might be any subclass."""


def test_another_thread_may_be_importing_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.tensor"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # as it is before its body has run
    assert not is_dtensor(torch.ones(2).as_subclass(Named))
