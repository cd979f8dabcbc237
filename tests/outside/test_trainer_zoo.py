"""Every causal language model of transformers that plain Trainer trains two steps is trained by
OffloadTrainer, with the same losses and gradient norms."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.offload.engine_cases import NVME, config
from tests.outside.test_causal_lm_zoo import NAMES, build
from tests.outside.trainer_cases import quiet, transformers

pytestmark = pytest.mark.sample(8)

pytest.importorskip("accelerate")

LEAST_EQUAL = 128  # of the 178 that transformers 5.17 has
LEAST_EQUAL_OF_SAMPLE = 8  # every sixteenth one, without --long
ARGUMENTS: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1,
    "logging_nan_inf_filter": False, "save_strategy": "no", "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "seed": 1,
}  # fmt: skip
CLOSE = 1e-5  # AdamW agrees to rounding

outcomes: Counter[str] = Counter()
reasons: dict[str, str] = {}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self._rows = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def trained(kind: Any, model: Any, folder: Path, **more: Any) -> tuple[list[float], Any]:
    """What it logs: losses, then norms; and the trainer."""
    args = transformers.TrainingArguments(output_dir=str(folder / "run"), **ARGUMENTS)
    trainer = kind(model, args, train_dataset=Rows(), **more)
    trainer.train()
    history = trainer.state.log_history
    keys = ("loss", "grad_norm")
    return [entry[key] for key in keys for entry in history if key in entry], trainer


@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_two_steps_log_what_plain_trainer_logs(model_type: str, tmp_path: Path, long: bool) -> None:
    from offload.integrations.transformers import OffloadTrainer

    if not long and sorted(NAMES).index(model_type) % 16:
        outcomes["left to --long"] += 1
        pytest.skip("every sixteenth architecture: --long has all")
    with quiet():
        try:
            expected, _ = trained(transformers.Trainer, build(model_type), tmp_path)
        except Exception as error:  # noqa: BLE001 - whatever keeps plain Trainer from training it
            outcomes["does not build or train plainly"] += 1
            reasons[model_type] = f"{type(error).__name__}: {error}".split("\n")[0][:90]
            pytest.skip(reasons[model_type])
        budget = {"host": "64MiB", "nvme": "256MiB"}
        settings = config(tmp_path, NVME, budget=budget, optimizer={"chunk": 65536})
        found, trainer = trained(OffloadTrainer, build(model_type), tmp_path, offload=settings)
        trainer.engine.close()
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
    outcomes["equal"] += 1


def test_enough_architectures_were_compared() -> None:
    """Runs last: fails when architectures stop building, whatever the reason."""
    print(dict(outcomes))
    if outcomes.total() < len(NAMES):
        pytest.skip("only part of the architectures was selected")
    least = LEAST_EQUAL_OF_SAMPLE if outcomes["left to --long"] else LEAST_EQUAL
    assert outcomes["equal"] >= least, reasons
