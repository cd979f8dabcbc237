"""What the tests of other people's trainers share: a tiny Llama, rows of tokens, logs."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.offload.engine_cases import HOST, NVME, config, seeded

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 64, 12
STEPS, ACCUMULATE = 12, 4
CLIP = 0.5  # below every norm here
PLACEMENTS = {"host": HOST, "nvme": NVME}
NUMBERS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
CLOSE = 3e-6  # AdamW agrees to rounding
# of transformers.TrainingArguments and what is made of it
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATE,
    "max_grad_norm": CLIP, "learning_rate": NUMBERS["lr"], "logging_steps": 1,
    "logging_nan_inf_filter": False, "eval_strategy": "steps", "eval_steps": 5,
    "save_strategy": "steps", "save_steps": 8, "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "seed": 7,
}  # fmt: skip


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def tiny_llama() -> Any:
    """Three blocks, and a head tied to the embedding."""
    settings = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return seeded(lambda: transformers.LlamaForCausalLM(settings))


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, **NUMBERS)


BLOCKS = {"groups": {"blocks": ["LlamaDecoderLayer"]}}  # each is a group of its own


def settings(folder: Path, placement: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    return config(
        folder, placement, **{"optimizer": {"type": "adamw", **NUMBERS}, **BLOCKS, **keys}
    )


def logged(trainer: Any) -> dict[str, list[float]]:
    """Losses, gradient norms and evaluation losses, in order."""
    history = trainer.state.log_history
    keys = ("loss", "grad_norm", "eval_loss")
    return {key: [entry[key] for entry in history if key in entry] for key in keys}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(actual: Any, expected: Any) -> None:
    """Numbers, lists and dictionaries of them, to `CLOSE`."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=CLOSE)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and prints of other libraries inside."""
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def forget() -> None:
    """Let accelerate begin anew: it keeps its state for the process."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
