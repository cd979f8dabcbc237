"""One rank's part in trainings by several, by OffloadTrainer and then a plain Trainer; the first
rank writes their logs to FOLDER/offload.json and FOLDER/plain.json.

torchrun --standalone --nproc_per_node 2 -m tests.outside.trainer_ranks_program FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from offload.integrations.transformers import OffloadTrainer
from tests.offload.engine_cases import NVME, config
from tests.outside.trainer_cases import ARGUMENTS, Rows, logged, quiet, tiny_llama


def trainer_of(kind: str, folder: Path) -> Any:
    keys = {**ARGUMENTS, "max_steps": 6, "save_steps": 3, "eval_steps": 3, "weight_decay": 0.1}
    args = transformers.TrainingArguments(
        output_dir=str(folder / kind), **{**keys, "gradient_accumulation_steps": 2}
    )
    given: dict[str, Any] = {"train_dataset": Rows(40, seed=1), "eval_dataset": Rows(8, seed=2)}
    if kind == "plain":
        return transformers.Trainer(tiny_llama(), args, **given)
    blocks = {"blocks": ["LlamaDecoderLayer"]}
    settings = config(folder, NVME, groups=blocks, zero={"stage": 3, "timeout_s": 60.0})
    return OffloadTrainer(tiny_llama(), args, offload=settings, **given)


def train(kind: str, folder: Path) -> dict[str, Any]:
    trainer = trainer_of(kind, folder)
    trainer.train()
    results = {"whole": logged(trainer)}
    trainer.save_model(str(folder / f"{kind}-model"))
    if kind == "offload":
        trainer.engine.close()
        again = trainer_of(kind, folder)
        again.train(resume_from_checkpoint=str(folder / kind / "checkpoint-3"))
        results["resumed"] = logged(again)
        again.save_model(str(folder / "again-model"))
        again.engine.close()
    return results


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for kind in "offload", "plain":
        with quiet():
            results = train(kind, folder)
        if dist.get_rank() == 0:
            (folder / f"{kind}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # DDP over gloo waits for ever, now and then, where it is destroyed


if __name__ == "__main__":
    main()
