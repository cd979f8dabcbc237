"""Every key of a DeepSpeed configuration, and its counterpart in offload.

`migration` reads a file by this table, docs/deepspeed.md shows it. Key names, meanings and defaults
are those of DeepSpeed 0.19.8; names that older versions had are there as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError


class Fate(StrEnum):
    """The way in which a key is migrated."""

    MAPPED = "becomes"  # a key of offload, or a printed scheduler
    UNNEEDED = "needs no key"  # the result is the same without it
    WARNED = "warned about"  # dropped, with a warning
    REFUSED = "refused"  # training without it would be another training


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
    """A key of DeepSpeed. `harmless`: values of a warned or refused key that have no effect."""

    name: str
    fate: Fate
    note: str  # what becomes of it, for the docs and for the comment in the YAML
    becomes: str = ""  # offload's key
    kind: Any = Any  # the type of its values
    harmless: tuple[Any, ...] = ()
    also: tuple[str, ...] = ()  # other names of the same key
    filled: str = ""  # the argument from which transformers' Trainer fills `auto`


def _mapped(name: str, becomes: str, kind: Any, note: str, **more: Any) -> Key:
    return Key(name, Fate.MAPPED, note, becomes, kind, **more)


def _unneeded(note: str, *names: str, **more: Any) -> Iterator[Key]:
    """Yield keys that need no counterpart for the same reason."""
    yield from (Key(name, Fate.UNNEEDED, note, **more) for name in names)


def _warned(name: str, note: str, *harmless: Any, **more: Any) -> Key:
    return Key(name, Fate.WARNED, note, harmless=(None, *harmless), **more)


def _refused(name: str, note: str, *harmless: Any, **more: Any) -> Key:
    return Key(name, Fate.REFUSED, note, harmless=(None, *harmless), **more)


_OFF = {"enabled": False}
_SWAP_PATH = "a folder for swap files; two different are striped"
_PINNED = "host memory is pinned as it is used, beside a GPU"

TOP = (
    _mapped(
        "gradient_accumulation_steps", "gradient_accumulation_steps", Whole,
        "the number of passes before a step. In a loop of your own divide the loss by it and step "
        "after as many passes; offload.deepspeed does both, as DeepSpeed",
        filled="gradient_accumulation_steps",
    ),
    _mapped(
        "train_batch_size", "gradient_accumulation_steps", Whole,
        "divided by the batch per rank and the ranks, where accumulation is not given",
        filled="per_device_train_batch_size x gradient_accumulation_steps x ranks",
    ),
    _mapped(
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", Whole,
        "the batch that your loader makes; here only for the division above",
        filled="per_device_train_batch_size",
    ),
    _mapped(
        "gradient_clipping", "clip_grad_norm", Number,
        "0: no clipping. Absent: DeepSpeed 0.19.8 clips to 1.0, versions before did not clip",
        filled="max_grad_norm",
    ),
    _mapped(
        "communication_data_type", "zero.reduce_dtype", str,
        "format of gradients between ranks. Absent: fp32 here, the training format in DeepSpeed",
    ),
    _refused(
        "managed_gradient_accumulation",
        "engine.set_gradient_accumulation_boundary says which step() is a step", True,
    ),
    _refused(
        "gradient_allreduce_op",
        "ranks average gradients here; multiply the loss by the number of ranks for their sum",
        "mean",
    ),
    *_unneeded(
        "gradients are summed in fp32, and divided once at the end", "prescale_gradients",
        "gradient_predivide_factor", "disable_allgather",
    ),
    *_unneeded(
        "updates always run in our kernels; an optimizer without a rule of ours is refused",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    ),
    *_unneeded("offload.deepspeed does it", "steps_per_print", "dataloader_drop_last"),
    *_unneeded(
        "engine.report() and run folders have times and bytes, `offload config show` every "
        "setting; Python's logging and gc are yours", "wall_clock_breakdown", "memory_breakdown",
        "dump_state", "disable_python_gc", "vocabulary_size", "log_level",
    ),
    _warned(
        "seq_parallel_communication_data_type",
        "sequence parallelism is the model's own, and so are its formats", "fp32",
    ),
)  # fmt: skip

# A name with `stage3_` before it is the same key.
ZERO = (
    _mapped("stage", "zero.stage", Whole, "the same stages; absent: 0, as in DeepSpeed"),
    _mapped(
        "sub_group_size", "optimizer.chunk", Whole,
        "elements that are updated in one piece, rounded to a multiple of 1024. DeepSpeed's "
        "default of 1e9 and more become auto: pieces are streamed here",
    ),
    _mapped(
        "prefetch_bucket_size", "prefetch", Whole,
        "0: nothing is fetched ahead. Other numbers of elements become auto: as many groups as the "
        "budget holds", filled="the model's hidden size",
    ),
    _mapped(
        "zero_hpz_partition_size", "zero.shard_group", Whole,
        "neighbouring ranks that share one copy; here of all states, not of parameters alone",
    ),
    _mapped("mics_shard_size", "zero.shard_group", Number, "as MiCS; -1: off"),
    _mapped("offload_param", "placement.parameters", Any, "null: not offloaded"),
    _mapped("offload_optimizer", "placement.optimizer", Any, "null: not offloaded"),
    *_unneeded(
        "prefetch: auto keeps as much as budget.device holds; set that, in bytes, to hold less",
        "max_live_parameters", "max_reuse_distance",
    ),
    *_unneeded(
        "groups are whole blocks, which are gathered and reduced in one call each; groups.blocks "
        "names others. docs/ranks.md has their bytes",
        "param_persistence_threshold", "model_persistence_threshold",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
        "allgather_partitions", "mics_hierarchical_params_gather", "contiguous_gradients",
        "round_robin_gradients", "reduce_scatter", "allgather_bucket_size", "allgather_size",
        "use_multi_rank_bucket_allreduce", "parameter_alignment", "memory_efficient_linear",
    ),
    *_unneeded(
        "as allgather_bucket_size", "reduce_bucket_size", filled="the model's hidden size squared"
    ),
    *_unneeded(
        "checkpoints are streamed, hold whole tensors with their masters, and load on any number "
        "of ranks; `offload checkpoint export FOLDER OUT` writes the weights alone",
        "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save",
        "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint",
    ),
    *_unneeded(
        "it is always so here", "overlap_comm", "compute_grad_norm", "override_module_apply",
        "cpu_offload_use_pin_memory",
    ),
    *_unneeded(
        "engine.report() counts hits and misses, engine.check_integrity() checks the books",
        "log_trace_cache_warnings", "enable_sanity_checks",
    ),
    *_unneeded("of Muon, which is refused", "save_muon_momentum_buffer_in_memory"),
    *_unneeded("a section that belongs at the top; needs no key there either", "aio"),
    _refused("cpu_offload", "old: write offload_optimizer: {device: cpu}", False),
    *(
        _refused(name, "old: write offload_param: {device: cpu}", False)
        for name in ("cpu_offload_param", "cpu_offload_params")
    ),
    _warned(
        "leaf_module", "groups are whole blocks; name others in groups.blocks, as modules whose "
        "branches the ranks choose differently", {},
    ),
    _warned(
        "ignore_unused_parameters", "an unused parameter is left as it is, without an error", True
    ),
    _warned("legacy_stage1", "there is one stage 1", False),
    _warned("zero_quantized_weights", "parameters are gathered exactly", False),
    _warned(
        "zero_quantized_gradients", "gradients are summed exactly; zero.reduce_dtype: bf16 halves "
        "the bytes of fp32", False,
    ),
    _warned(
        "zero_quantized_nontrainable_weights", "frozen weights stay as exact as they are; where "
        "some are frozen, storage: {weights: int8} stores them so", False,
    ),
    _refused(
        "zenflow", "its updates use gradients of earlier steps. Remove it: an update runs behind "
        "the next forward here, and is exact",
    ),
    _refused("zeropp_loco_param", "error feedback is not there; remove it"),
)  # fmt: skip

OFFLOAD_PARAM = (
    _mapped("device", "placement.parameters", str, "cpu: host; nvme: nvme; none: auto"),
    _mapped("nvme_path", "nvme.paths", str, _SWAP_PATH),
    *_unneeded(
        "budget.host: auto takes what is free; set it, in bytes of all states, to hold less",
        "max_in_cpu", "buffer_count", "buffer_size",
    ),
    *_unneeded(_PINNED, "pin_memory"),
)  # fmt: skip
OFFLOAD_OPTIMIZER = (
    _mapped(
        "device", "placement.optimizer", str,
        "cpu: host, and gradients with it; nvme: nvme; none: auto",
    ),
    _mapped("nvme_path", "nvme.paths", str, _SWAP_PATH),
    _mapped(
        "ratio", "placement.optimizer", Number, "the share that is offloaded; the rest: device"
    ),
    *_unneeded(
        "states are streamed in pieces of optimizer.chunk, read, updated and written side by side; "
        "threads.optimizer says by how many threads",
        "buffer_count", "buffer_size", "pipeline", "pipeline_read", "pipeline_write",
        "super_offload", "fast_init", "cpuadam_cores_perc",
    ),
    *_unneeded(_PINNED, "pin_memory"),
)  # fmt: skip
AIO = (
    *_unneeded(
        "nvme.backend and nvme.threads: auto take what works best; `offload bench io` measures",
        "block_size", "queue_depth", "intra_op_parallelism", "thread_count", "single_submit",
        "overlap_events",
    ),
    _warned("use_gds", "files are read into host memory, and copied from there", False),
)  # fmt: skip

FP16 = (
    _mapped("enabled", "precision", bool, "true: fp16", filled="fp16"),
    _mapped("loss_scale", "loss_scale", Number, "0: dynamic. A fixed scale: initial and min"),
    _mapped("initial_scale_power", "loss_scale.initial", Whole, "2 to this power"),
    _mapped("loss_scale_window", "loss_scale.growth_interval", Whole, "steps before it doubles"),
    _mapped(
        "min_loss_scale", "loss_scale.min", Number,
        "the smallest scale; an overflow there skips the step, and so many in a row as "
        "`max_skipped_steps` says are an error",
    ),
    _warned(
        "hysteresis", "the scale is halved at the first overflow, as with 1: fewer steps are "
        "skipped at the start", 1,
    ),
    *_unneeded("there is no hysteresis", "consecutive_hysteresis"),
    _refused("auto_cast", "cast the inputs in your loop (x.half()), and remove it", False),
    _refused(
        "fp16_master_weights_and_grads", "masters of fp16 weights are fp32; remove it", False
    ),
)  # fmt: skip
BF16 = (
    _mapped("enabled", "precision", bool, "true: bf16", filled="bf16"),
    _mapped(
        "check_grad_overflow", "skip_nonfinite", bool,
        "steps with infinite or NaN gradients are skipped; absent: true, as in DeepSpeed",
        also=("check_overflow",),
    ),
    _mapped(
        "bf16_master_weights_and_grads", "optimizer.master", bool,
        "true: none. Weights are rounded stochastically, DeepSpeed rounds to nearest",
    ),
    _mapped("bf16_optimizer_states", "optimizer.states", bool, "true: bf16"),
    *_unneeded("gradients leave as they come", "immediate_grad_update"),
)  # fmt: skip

OPTIMIZER = (
    _mapped(
        "type", "optimizer.type", str,
        "Adam and AdamW: adamw (adam with adam_w_mode: false), Lion, Adagrad, SGD. Others (Lamb, "
        "OneBitAdam, Muon, ...) are refused",
    ),
    _mapped("params", "optimizer", Any, "its numbers; absent ones are DeepSpeed's defaults"),
    *_unneeded("there is one kernel", "legacy_fusion"),
)  # fmt: skip
OPTIMIZER_PARAMS = (
    _mapped("lr", "optimizer.lr", Number, "", filled="learning_rate"),
    _mapped("betas", "optimizer.betas", tuple[Number, Number], "", filled="adam_beta1, adam_beta2"),
    _mapped("eps", "optimizer.eps", Number, "", filled="adam_epsilon"),
    _mapped(
        "weight_decay", "optimizer.weight_decay", Number, "absent: 0, as in DeepSpeed's kernels",
        filled="weight_decay",
    ),
    _mapped("amsgrad", "optimizer.amsgrad", bool, ""),
    _mapped("momentum", "optimizer.momentum", Number, ""),
    _mapped("dampening", "optimizer.dampening", Number, ""),
    _mapped("nesterov", "optimizer.nesterov", bool, ""),
    _mapped("lr_decay", "optimizer.lr_decay", Number, ""),
    _mapped("maximize", "optimizer.maximize", bool, ""),
    _mapped(
        "adam_w_mode", "optimizer.type", bool, "false with Adam: adam",
        also=("adamw_mode",),
    ),
    _mapped(
        "torch_adam", "optimizer.weight_decay", bool,
        "torch's own class: its default of weight_decay for AdamW is 0.01",
    ),
    *_unneeded(
        "our kernels are fused", "fused", "foreach", "capturable", "differentiable",
        "set_grad_none",
    ),
    _warned(
        "fp32_optimizer_states", "optimizer.states: bf16 is the counterpart of false", True
    ),
    _refused("bias_correction", "Adam without it has no rule", True),
    _refused("initial_accumulator_value", "Adagrad begins with zeros", 0),
    _refused("decoupled_weight_decay", "set optimizer.type: AdamW or Adam instead", False),
    _refused("max_grad_norm", "set gradient_clipping instead, as DeepSpeed says", 0),
)  # fmt: skip
SCHEDULER = (
    _mapped(
        "type", "", str,
        "printed as code, and what offload.deepspeed runs: WarmupLR, WarmupDecayLR, "
        "WarmupCosineLR",
    ),
    _mapped("params", "", Any, "its numbers, in that code", filled="warmup_steps, max_steps"),
)  # fmt: skip

ACTIVATION_CHECKPOINTING = (
    _mapped(
        "cpu_checkpointing", "placement.activations.tier", bool,
        "true: host. All saved activations move, not only the inputs of blocks",
    ),
    *_unneeded(
        "saved activations go through one window, in the order of their uses",
        "partition_activations", "partitioned_activations", "contiguous_memory_optimization",
        "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
    ),
)  # fmt: skip
DATA_TYPES = (
    *_unneeded("sums of several passes are fp32; the first has its own format", "grad_accum_dtype"),
    *_unneeded("precision decides it; DeepSpeed refuses another one", "param_dtype"),
    _warned("buffer_dtype", "buffers keep their format; cast them before initialize"),
    *_unneeded("buffers keep their format", "keep_in_fp32_modules"),
)
CHECKPOINT = (
    *_unneeded("ranks compare what they are about to save", "tag_validation"),
    *_unneeded(
        "the first rank streams all of a checkpoint, as safetensors files",
        "checkpoint_serialization", "writer", "use_node_local_storage", "parallel_write",
    ),
    _refused(
        "load_universal", "only checkpoints of ours are loaded; load the weights with weights=",
        False,
    ),
)  # fmt: skip
TORCH_AUTOCAST = (
    _refused(
        "enabled", "put torch.autocast around the forward in your loop, and remove it", False,
        kind=bool,
    ),
    *_unneeded("torch.autocast's", "dtype", "lower_precision_safe_modules"),
)  # fmt: skip

SECTIONS: dict[str, tuple[Key, ...]] = {
    "": TOP,
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "aio": AIO,
    "fp16": FP16,
    "bf16": BF16,
    "optimizer": OPTIMIZER,
    "optimizer.params": OPTIMIZER_PARAMS,
    "scheduler": SCHEDULER,
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
    "data_types": DATA_TYPES,
    "checkpoint": CHECKPOINT,
    "torch_autocast": TORCH_AUTOCAST,
}

# Sections that are looked into no further.
OTHERS = (
    _mapped(
        "offload", "", Any, "not DeepSpeed's, which ignores it: keys of ours, as budget, laid "
        "over what the others become",
    ),
    _warned("flops_profiler", "`memest` and run folders say what a step costs", _OFF),
    _warned("autotuning", "`memest --write FILE` chooses the settings", _OFF),
    *(
        _warned(name, "loggers of engine.offload.watch (docs/watching.md)", _OFF)
        for name in ("tensorboard", "wandb", "comet", "csv_monitor", "monitor_config")
    ),
    _warned("comms_logger", "engine.report() counts bytes moved", _OFF),
    _warned("timers", "engine.report() and run folders have times and bytes"),
    _warned("elasticity", "restart on another number of ranks and load the checkpoint", _OFF),
    _warned("nebula", "checkpoints are written by engine.save_checkpoint", _OFF),
    _warned("datastates_ckpt", "checkpoints are written by engine.save_checkpoint"),
    _warned("compile", "torch.compile(model) works as it is"),
    _warned("graph_harvesting", "torch.compile(model) works as it is", False),
    _warned("hybrid_engine", "model.generate works between steps", _OFF),
    _warned("use_data_before_expert_parallelism", "there are no expert groups", False),
    _warned("data_parallel_size", "all ranks, or those of mesh="),
    _refused("sequence_parallel_size", "use torch's context parallelism, and mesh=", 1),
    _refused(
        "tensor_parallel", "use parallelize_module, and mesh= (docs/ranks.md)",
        {}, {"autotp_size": 0}, {"autotp_size": 1},
    ),
    _refused("expert_parallel", "use parallelize_module, and mesh= (docs/ranks.md)", _OFF),
    _refused("pipeline", "use torch.distributed.pipelining, and mesh= (docs/ranks.md)", {}),
    _refused("amp", "use fp16, bf16 or torch_autocast", _OFF),
    _refused("sparse_gradients", "embeddings with sparse=True work; remove the key", False),
    _refused("weight_quantization", "weights are not quantized"),
    *(
        _refused(name, "DeepSpeed has removed it", _OFF)
        for name in (
            "sparse_attention", "compression_training", "quantize_training", "eigenvalue",
            "progressive_layer_drop",
        )
    ),
    *(
        _refused(name, "make the batches in your loop", _OFF)
        for name in ("curriculum_learning", "data_efficiency")
    ),
)  # fmt: skip
