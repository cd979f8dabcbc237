"""The table has every key of the installed DeepSpeed."""

from collections.abc import Iterator
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
