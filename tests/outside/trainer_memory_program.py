"""Trains two steps through OffloadTrainer with everything on nvme, saves and resumes. Prints peaks
of RAM in MiB as JSON.

python -m tests.outside.trainer_memory_program FOLDER
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from offload.integrations.transformers import OffloadTrainer
from offload.process import machine
from tests.outside.trainer_cases import Rows, quiet

MIB = 1 << 20


def model() -> Any:
    """100 M parameters, on the meta device."""
    settings = transformers.LlamaConfig(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=12, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(settings)


def trainer_of(folder: Path) -> OffloadTrainer:
    nvme = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
    args = transformers.TrainingArguments(
        output_dir=str(folder / "run"), max_steps=2, per_device_train_batch_size=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    offload = {
        "budget": {"host": "256MiB", "nvme": "4GiB"}, "nvme": {"paths": [str(folder)]},
        "placement": nvme,
    }  # fmt: skip
    return OffloadTrainer(model(), args, train_dataset=Rows(8, seed=1), offload=offload)


def peak() -> int:
    """Since the last call."""
    found = machine.peak_rss_nbytes()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return found // MIB


def main() -> None:
    folder = Path(sys.argv[1])
    with quiet():
        trainer = trainer_of(folder)
        before = peak()
        trainer.train()
        found = {"before": before, "training": peak()}
        trainer._save_checkpoint(trainer.model, None)
        found["saving"] = peak()
        trainer.engine.close()
        trainer = trainer_of(folder)
        trainer.args.max_steps = 4
        peak()
        trainer.train(resume_from_checkpoint=str(folder / "run/checkpoint-2"))
        found["resuming"] = peak()
        trainer.save_model(str(folder / "model"))
        found["model"] = peak()
        trainer._load_from_checkpoint(str(folder / "model"))
        found["weights"] = peak()
        trainer.engine.close()
    states = sum(p.numel() for p in trainer.model.parameters()) * 16
    print(json.dumps({**found, "states": states // MIB}))


if __name__ == "__main__":
    main()
