"""A language model learns a soliloquy by heart through transformers' Trainer, from nvme.

    pip install 'offload[hf]'
    python examples/trainer.py                      # no network, half a minute
    python examples/trainer.py --max_steps 200 --resume_from_checkpoint true

It is the script of a plain Trainer but for two lines: OffloadTrainer, and `offload=`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

from offload.integrations.transformers import OffloadTrainer

LENGTH = 64
TEXT = Path(__file__).with_name("soliloquy.txt")
OFFLOAD = {
    "budget": {"host": "48MiB", "nvme": "1GiB"},
    "placement": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"},
}


@dataclass
class Arguments(TrainingArguments):
    output_dir: str = "runs/trainer"
    max_steps: int = 150
    per_device_train_batch_size: int = 8
    learning_rate: float = 3e-3
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 10
    logging_steps: float = 10
    save_steps: float = 50
    save_total_limit: int = 2
    report_to: str = "none"
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "A checkpoint's folder, or true for the last one."}
    )


class Rows(torch.utils.data.Dataset):
    """Overlapping rows of bytes."""

    def __init__(self, text: bytes) -> None:
        self.rows = torch.tensor(list(text)).unfold(0, LENGTH, LENGTH // 4).contiguous()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    with torch.device("meta"):  # weights are made group by group, in their tier
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
                num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=True,
                max_position_embeddings=512, bos_token_id=10, eos_token_id=None, pad_token_id=0,
            )
        )  # fmt: skip
    trainer = OffloadTrainer(model, args, train_dataset=Rows(TEXT.read_bytes()), offload=OFFLOAD)
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "true" else resume)
    start = torch.tensor([list(b"To be, or not")], device=trainer.engine.device)
    made = model.generate(start, max_new_tokens=80, do_sample=False)
    print(bytes(made[0].tolist()).decode(errors="replace"))
    trainer.save_model(f"{args.output_dir}/model")  # for from_pretrained
    for name, tier in trainer.engine.report().tiers.items():
        print(f"{name}: at most {tier.peak_nbytes / 2**20:.0f} MiB")
    trainer.engine.close()


if __name__ == "__main__":
    main()
