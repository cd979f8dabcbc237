"""Supervised fine-tuning of LoRA adapters by TRL and PEFT; the model's weights stay on nvme.

pip install 'offload[hf]' trl
python examples/sft_lora.py                 # a tiny model that knows nothing; no network
python examples/sft_lora.py Llama-3.1-8B    # the folder of a model: raise budget.host below
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f"{error.name} is missing: pip install 'offload[hf]' trl")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import offload
from offload.integrations.transformers import OffloadMixin

CPU = not torch.accelerator.is_available()
OUT, TEXT = Path("runs/sft_lora"), Path(__file__).with_name("soliloquy.txt")
OFFLOAD = {  # frozen weights are read and never written; what adapters need stays in RAM
    "budget": {"host": "20MiB", "nvme": "64GiB"},
    "placement": {"parameters": "nvme", "gradients": "host", "optimizer": "host"},
}


class Trainer(OffloadMixin, SFTTrainer):  # type: ignore[misc]
    pass


def tiny(folder: Path) -> Path:
    """The folder of a model whose tokens are bytes: 26 MiB, more than the budget for RAM."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "</s>"]
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=256, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, pad_token_id=256, eos_token_id=257,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main(folder: Path) -> None:
    rows = [{"prompt": a, "completion": b} for a, b in pairwise(TEXT.read_text().splitlines())]
    trainer: Any = Trainer(
        offload.open_pretrained(folder),  # its weights stay in its files until the engine has them
        SFTConfig(str(OUT), max_steps=30, learning_rate=3e-3, logging_steps=5, use_cpu=CPU),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        offload=OFFLOAD,
    )
    trainer.train()
    trainer.save_model(OUT / "adapter")  # PEFT's own files, without the model
    for link, nbytes in trainer.engine.report().bytes_moved.items():
        print(f"{link}: {nbytes / 2**20:.0f} MiB")
    trainer.engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else tiny(OUT / "base"))
