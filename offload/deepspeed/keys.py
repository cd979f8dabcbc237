"""The keys of a DeepSpeed configuration: those that become keys of offload, those that are ignored,
and those that are not supported.

`migration` reads a file by these tables, docs/deepspeed.md shows the first one. Names, meanings and
defaults are those of DeepSpeed 0.19.8; names that older versions had are there as well.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

# The types of values: numbers may be strings (YAML's 1e-4), and whole ones floats (5e8).
Whole = NonNegativeInt
Number = FiniteFloat


def read(kind: Any, value: Any) -> Any:
    """Return a value as one of type `kind`. Raise ValueError for values that are none."""
    if isinstance(value, bool) and kind in (Whole, Number):
        raise ValueError("expected a number")
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise ValueError(f"expected {reason}") from None


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed, and the key of offload that it becomes."""

    becomes: str  # offload's key; empty: there is none
    kind: Any  # the type of its values
    note: str = ""  # for the docs


_SWAP_PATH = Key("nvme.paths", str, "a folder for swap files; two different are striped")

# By section. In `zero_optimization` a name with `stage3_` before it is the same key.
MAPPED: dict[str, dict[str, Key]] = {
    "": {
        "gradient_accumulation_steps": Key(
            "gradient_accumulation_steps",
            Whole,
            "in a loop of your own divide the loss by it and step after as many passes; "
            "offload.deepspeed does both",
        ),
        "train_batch_size": Key(
            "gradient_accumulation_steps",
            Whole,
            "divided by the batch per rank and the ranks, where accumulation is not given",
        ),
        "train_micro_batch_size_per_gpu": Key(
            "gradient_accumulation_steps", Whole, "only for the division above"
        ),
        "gradient_clipping": Key(
            "clip_grad_norm", Number, "0: no clipping. Absent: 1, as in DeepSpeed since 0.19"
        ),
        "communication_data_type": Key("zero.reduce_dtype", str, "absent: fp32"),
        "dataloader_drop_last": Key("", bool, "`offload.deepspeed` alone"),
        "offload": Key("", Any, "keys of offload, as budget, laid over what the others become"),
    },
    "zero_optimization": {
        "stage": Key("zero.stage", Whole, "absent: 0"),
        "sub_group_size": Key(
            "optimizer.chunk", Whole, "rounded to a multiple of 1024; 1e9 and more: auto"
        ),
        "prefetch_bucket_size": Key("prefetch", Whole, "0: nothing is fetched ahead; others: auto"),
        "zero_hpz_partition_size": Key(
            "zero.shard_group", Whole, "here for all states, not for parameters alone"
        ),
        "mics_shard_size": Key("zero.shard_group", Number, "-1: off"),
    },
    "zero_optimization.offload_param": {
        "device": Key("placement.parameters", str, "cpu: host; nvme: nvme; none: auto"),
        "nvme_path": _SWAP_PATH,
    },
    "zero_optimization.offload_optimizer": {
        "device": Key(
            "placement.optimizer", str, "cpu: host, and gradients with it; nvme: nvme; none: auto"
        ),
        "nvme_path": _SWAP_PATH,
        "ratio": Key("placement.optimizer", Number, "the share that is offloaded"),
    },
    "fp16": {
        "enabled": Key("precision", bool),
        "loss_scale": Key("loss_scale", Number, "0: dynamic. A fixed scale: initial and min"),
        "initial_scale_power": Key("loss_scale.initial", Whole, "2 to this power"),
        "loss_scale_window": Key("loss_scale.growth_interval", Whole),
        "min_loss_scale": Key("loss_scale.min", Number),
    },
    "bf16": {
        "enabled": Key("precision", bool),
        "check_grad_overflow": Key("skip_nonfinite", bool, "absent: true"),
        "bf16_master_weights_and_grads": Key(
            "optimizer.master",
            bool,
            "true: none. Weights are rounded stochastically, DeepSpeed rounds to nearest",
        ),
        "bf16_optimizer_states": Key("optimizer.states", bool, "true: bf16"),
    },
    "optimizer": {
        "type": Key("optimizer.type", str, "Adam and AdamW: adamw; Lion, Adagrad, SGD, Muon"),
    },
    "optimizer.params": {
        "lr": Key("optimizer.lr", Number),
        "betas": Key("optimizer.betas", tuple[Number, Number]),
        "eps": Key("optimizer.eps", Number),
        "weight_decay": Key("optimizer.weight_decay", Number, "absent: 0"),
        "amsgrad": Key("optimizer.amsgrad", bool),
        "momentum": Key("optimizer.momentum", Number),
        "dampening": Key("optimizer.dampening", Number),
        "nesterov": Key("optimizer.nesterov", bool),
        "lr_decay": Key("optimizer.lr_decay", Number),
        "maximize": Key("optimizer.maximize", bool),
        "muon_lr": Key("optimizer.lr", Number, "with Muon; absent: lr"),
        "adam_lr": Key("optimizer.adamw_lr", Number, "with Muon; absent: lr"),
        "adam_w_mode": Key("optimizer.type", bool, "false with Adam: adam"),
        "torch_adam": Key("optimizer.weight_decay", bool, "true with AdamW: 0.01 where absent"),
    },
    "scheduler": {"type": Key("", str, "WarmupLR, WarmupDecayLR, WarmupCosineLR; printed as code")},
    "scheduler.params": {},  # `schedules` has them
    "activation_checkpointing": {
        "cpu_checkpointing": Key(
            "placement.activations.tier", bool, "true: host. All saved activations move"
        )
    },
}
ALSO = {  # other names of the same key
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "optimizer.params.adamw_mode": "optimizer.params.adam_w_mode",
}
# What transformers' Trainer fills in where a file says `auto`.
FILLED = (
    "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_clipping", "fp16.enabled", "bf16.enabled", "optimizer.params.lr",
    "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
)  # fmt: skip

# Without them the results are the same, or the program says less of itself.
IGNORED: dict[str, tuple[str, ...]] = {
    "": (
        "steps_per_print", "prescale_gradients", "gradient_predivide_factor", "disable_allgather",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "wall_clock_breakdown",
        "memory_breakdown", "dump_state", "disable_python_gc", "vocabulary_size", "log_level",
        "seq_parallel_communication_data_type", "aio", "data_types", "checkpoint", "flops_profiler",
        "autotuning", "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config",
        "comms_logger", "timers", "elasticity", "nebula", "datastates_ckpt", "compile",
        "graph_harvesting", "hybrid_engine", "use_data_before_expert_parallelism",
        "data_parallel_size",
    ),
    "zero_optimization": (
        "max_live_parameters", "max_reuse_distance", "param_persistence_threshold",
        "model_persistence_threshold", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "allgather_sequential", "allgather_partitions",
        "mics_hierarchical_params_gather", "contiguous_gradients", "round_robin_gradients",
        "reduce_scatter", "reduce_bucket_size", "allgather_bucket_size", "allgather_size",
        "use_multi_rank_bucket_allreduce", "parameter_alignment", "memory_efficient_linear",
        "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save",
        "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint",
        "overlap_comm", "compute_grad_norm", "override_module_apply", "cpu_offload_use_pin_memory",
        "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory",
        "aio", "leaf_module", "ignore_unused_parameters", "legacy_stage1", "zero_quantized_weights",
        "zero_quantized_gradients", "zero_quantized_nontrainable_weights",
    ),
    "zero_optimization.offload_param": (
        "max_in_cpu", "buffer_count", "buffer_size", "pin_memory",
    ),
    "zero_optimization.offload_optimizer": (
        "buffer_count", "buffer_size", "pipeline", "pipeline_read", "pipeline_write",
        "super_offload", "fast_init", "cpuadam_cores_perc", "pin_memory",
    ),
    "fp16": ("hysteresis", "consecutive_hysteresis"),
    "bf16": ("immediate_grad_update",),
    "optimizer": ("legacy_fusion",),
    "optimizer.params": (
        "fused", "foreach", "capturable", "differentiable", "set_grad_none",
        "fp32_optimizer_states",
    ),
    "activation_checkpointing": (
        "partition_activations", "partitioned_activations", "contiguous_memory_optimization",
        "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
    ),
}  # fmt: skip
# Training without them would be another training.
UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "": (
        "managed_gradient_accumulation", "gradient_allreduce_op", "torch_autocast",
        "sequence_parallel_size", "tensor_parallel", "expert_parallel", "pipeline", "amp",
        "sparse_gradients", "weight_quantization", "sparse_attention", "compression_training",
        "quantize_training", "eigenvalue", "progressive_layer_drop", "curriculum_learning",
        "data_efficiency",
    ),
    "zero_optimization": (
        "cpu_offload", "cpu_offload_param", "cpu_offload_params", "zenflow", "zeropp_loco_param",
    ),
    "fp16": ("auto_cast", "fp16_master_weights_and_grads"),
    "optimizer.params": (
        "bias_correction", "initial_accumulator_value", "decoupled_weight_decay", "max_grad_norm",
    ),
}  # fmt: skip
# Values that ask for nothing; of other keys those that are off do.
HARMLESS = {
    "managed_gradient_accumulation": True,
    "gradient_allreduce_op": "mean",
    "sequence_parallel_size": 1,
    "optimizer.params.bias_correction": True,
}
