"""The installed DeepSpeed: the table has every key of it, and it runs the same program to the same
numbers."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.deepspeed.keys import ALSO, IGNORED, MAPPED, UNSUPPORTED

KNOWN = {
    section: {*keys, *IGNORED.get(section, ()), *UNSUPPORTED.get(section, ())}
    | {path.rpartition(".")[2] for path in (*MAPPED, *ALSO) if path.rpartition(".")[0] == section}
    for section, keys in MAPPED.items()
}
KNOWN["zero_optimization"] |= {f"stage3_{name}" for name in KNOWN["zero_optimization"]}


def fields(model: Any) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        if field.alias is not None:
            yield field.alias


def test_every_field_of_deepspeeds_models_is_in_the_table() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    models = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
    }
    for section, model in models.items():
        assert set(fields(model)) - KNOWN[section] == set(), section


def test_every_key_that_is_no_field_is_in_the_table() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    assert set(ACT_CHKPT_DEFAULT) <= KNOWN["activation_checkpointing"]
    assert set(_REMOVED_ZERO_CONFIG_KEYS) <= KNOWN["zero_optimization"]
    assert set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) <= KNOWN[""]
    named = [  # of the constants that name a key at the top, and have a default beside them
        value for name, value in vars(constants).items()
        if isinstance(value, str) and f"{name}_DEFAULT" in vars(constants) and value.islower()
    ]  # fmt: skip
    inner = set().union(*KNOWN.values())
    old = {"check_overflow", "tag_validation", "load_universal", "pipeline_stage"}
    of_ignored_sections = {  # data_types and checkpoint
        "param_dtype", "buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules",
        "use_node_local_storage",
    }  # fmt: skip
    assert set(named) - inner - old - of_ignored_sections == set()


# ---------------------------------------------------------------- the same program, run by both
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("one_loop.py")


def rows(name: str, stage: int) -> list[list[float]]:
    """Losses, norms and learning rates."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), name, str(stage)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ":".join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("rows ")]
    return json.loads(line.removeprefix("rows "))


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_norms_and_rates_are_deepspeeds(stage: int) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    theirs, offloads = rows("deepspeed", stage), rows("offload.deepspeed", stage)
    for expected, actual in zip(theirs, offloads, strict=True):
        assert actual == pytest.approx(expected, rel=2e-5, abs=1e-7)


@pytest.mark.slow
def test_the_program_runs_with_its_import_changed() -> None:
    assert len(rows("offload.deepspeed", 3)) == 12
