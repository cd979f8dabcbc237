"""Causal language models of transformers begin from the meta device as they begin on the CPU.

Every parameter and buffer that is the same for all seeds (norms, masks, rotary frequencies, the row
of the padding token) is equal, the others have its mean and spread.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from offload.errors import UnsupportedError
from tests.offload.test_meta_models import assert_begun_alike, begun, on_meta
from tests.outside.test_causal_lm_zoo import MOST_NUMEL, NAMES, tiny_config, transformers

# Theirs leaves these to the constructor: nothing says again what it filled in.
REFUSED = {"apertus", "ernie4_5_moe", "openai-gpt"}
# Ties; initialisers that write to other modules' parameters; buffers; parameters of their own.
FEW = ("data2vec-text", "gpt2", "llama", "modernbert-decoder", "openai-gpt")
MANY = sorted({*NAMES} & {*sorted(NAMES)[::3], *FEW, *REFUSED})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", MANY)
def test_a_model_of_transformers_begins_as_on_the_cpu(
    model_type: str, tmp_path: Path, long: bool
) -> None:
    if not long and model_type not in FEW:
        pytest.skip("a few architectures: --long has more")
    try:
        shape = tiny_config(model_type)
        kind: Any = getattr(transformers, NAMES[model_type])
        model = on_meta(lambda: kind(copy.deepcopy(shape)))
        if sum(param.numel() for param in model.parameters()) > MOST_NUMEL:
            pytest.skip("not tiny")
        kind(copy.deepcopy(shape))
    except Exception as error:  # noqa: BLE001 - whatever keeps plain PyTorch from building it
        pytest.skip(f"{type(error).__name__}: {error}"[:90])

    def build() -> nn.Module:
        made: nn.Module = kind(copy.deepcopy(shape))
        return made

    start = partial(begun, tmp_path, model, budget={"host": "64MiB", "nvme": "64MiB"})
    if model_type in REFUSED:
        with pytest.raises(UnsupportedError, match="nothing gives a value"):
            start()
        return
    found = start()
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert_begun_alike(found, build)
