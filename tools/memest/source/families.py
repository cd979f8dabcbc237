"""Architectures whose modules are known without the library that implements them."""

from __future__ import annotations

from collections.abc import Mapping

from offload.tools.memest.source.families_gpt import GPT
from offload.tools.memest.source.families_llama import DENSE, EXPERTS
from offload.tools.memest.source.family import Family

FAMILIES: Mapping[str, Family] = {**DENSE, **EXPERTS, **GPT}  # by `model_type`
