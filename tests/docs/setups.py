"""What the programs of the pages are given by their readers: models, data, files. Tiny."""

from pathlib import Path
from typing import Any

import torch

BUDGET = "budget: {host: 64MiB, nvme: 64MiB}\n"


def configuration(name: str = "offload.yaml", text: str = BUDGET) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def language_model(seed: int = 0) -> Any:
    """A causal language model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=64))


def rows(number: int = 4) -> list[dict[str, torch.Tensor]]:
    """Texts for it, as a data set has them."""
    tokens = torch.arange(16 * number).reshape(number, 16) % 64
    return [{"input_ids": text, "labels": text} for text in tokens]


def batches(number: int = 2) -> list[dict[str, torch.Tensor]]:
    """The same, two by two, as a loader gives them."""
    singles = rows(2 * number)
    return [
        {key: torch.stack([a[key], b[key]]) for key in a}
        for a, b in zip(singles[::2], singles[1::2], strict=True)
    ]


def pretrained(folder: str) -> None:
    language_model().save_pretrained(folder)


def lightning_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module(), torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)
