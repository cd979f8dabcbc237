"""TrainingArguments' `use_liger_kernel` with OffloadTrainer, in Triton's interpreter.

Liger's kernels replace norms, rotary embedding, SwiGLU and the loss of the model. They read weights
of modules that they do not call: the head's in the loss, and each norm's.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CASES: dict[str, dict[str, Any]] = {
    "nvme": {"placement": "nvme"},
    "chunked": {"placement": "host", "gradient_checkpointing": True, "loss": {"chunked": True}},
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "tests.outside.test_liger"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize("case", CASES)
def test_liger_kernels_train_what_they_train_in_transformers_trainer(
    case: str, answers: dict[str, Any]
) -> None:
    from tests.outside.trainer_cases import CLOSE

    assert answers[case]["kernels"] == answers["plain"]["kernels"]
    assert answers[case]["losses"] == pytest.approx(answers["plain"]["losses"], rel=CLOSE)
    assert answers[case]["weights"] == pytest.approx(answers["plain"]["weights"], rel=CLOSE)


def test_kernels_of_liger_are_those_that_ran(answers: dict[str, Any]) -> None:
    assert {"_rms_norm", "_triton_rope", "_swiglu", "liger_cross_entropy"} <= {
        name.removesuffix("_kernel").removesuffix("_forward") for name in answers["nvme"]["kernels"]
    }


# ---------------------------------------------------------------- in the interpreter
@contextmanager
def _helped_interpreter() -> Iterator[list[str]]:
    """On a GPU, numbers that a kernel gets are tensors to it, and there is libdevice's rsqrt.

    Yields the names of kernels, as they are run.
    """
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    norm: Any = importlib.import_module("liger_kernel.ops.rms_norm")
    convert, run = interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    names: list[str] = []

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], np.float32), language.float32)
        return language.tensor(handle, language.float32)

    def named(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)
        run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", converted)
        patch.setattr(interpreter.GridExecutor, "__call__", named)
        patch.setattr(norm, "rsqrt", lambda x: language.rsqrt(x))
        yield names


def _trained(folder: Path, case: dict[str, Any] | None) -> dict[str, Any]:
    """Train a tiny Llama for two steps, by transformers' own Trainer if there is no `case`."""
    import torch
    import transformers

    from offload.integrations.transformers import OffloadTrainer
    from tests.outside.trainer_cases import ARGUMENTS, PLACEMENTS, Rows, config, tiny_llama

    keys = dict(case or {})
    placement = keys.pop("placement", "host")
    given = {
        **ARGUMENTS, "max_steps": 2, "eval_strategy": "no", "save_strategy": "no",
        "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1,
        "gradient_checkpointing": keys.pop("gradient_checkpointing", False),
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), use_liger_kernel=True, **given)
    model, rows = tiny_llama(), Rows(2, 0)
    if case is None:
        trainer = transformers.Trainer(model, args, train_dataset=rows)
        trainer.train()
    else:
        settings = config(folder, PLACEMENTS[placement], groups={"blocks": ["LlamaDecoderLayer"]})
        settings.pop("optimizer", None)
        trainer = OffloadTrainer(model, args, train_dataset=rows, offload={**settings, **keys})
        trainer.train()
        trainer.engine.close()
    with torch.no_grad():
        weights = [float(param.double().abs().sum()) for param in model.parameters()]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "weights": weights}


def main() -> None:
    answers: dict[str, Any] = {}
    with _helped_interpreter() as names:
        for name, case in {"plain": None, **CASES}.items():
            with tempfile.TemporaryDirectory() as folder:
                names.clear()
                answers[name] = {**_trained(Path(folder), case), "kernels": sorted(set(names))}
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
