"""Every key of a DeepSpeed configuration, and its counterpart in offload.

`migration` reads a file by this table, docs/deepspeed.md shows it. Key names, meanings and defaults
are those of DeepSpeed 0.19.8; names that older versions had are there as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    """The way in which a key is migrated."""

    MAPPED = "becomes"  # a key of offload, or a printed scheduler
    UNNEEDED = "needs no key"  # the result is the same without it
    WARNED = "warned about"  # dropped, with a warning
    REFUSED = "refused"  # training without it would be another training


Read = Callable[[Any], Any]


def anything(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def boolean(value: Any) -> bool:
    """Return a boolean, given as one or as a string. Raise ValueError for other values."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("expected true or false")


def number(value: Any) -> float:
    """Return a number, also from a string (YAML's 1e-4). Raise ValueError unless it is finite."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError("expected a number")
    return found


def whole(value: Any) -> int:
    """Return a whole number; 5e8 is one, too. Raise ValueError for other values and below zero."""
    found = number(value)
    if found < 0 or found != int(found):
        raise ValueError("expected a whole number of at least 0")
    return int(found)


def text(value: Any) -> str:
    """Return a string. Raise ValueError for other values."""
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


def pair(value: Any) -> list[float]:
    """Return a list of two numbers. Raise ValueError for other values."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("expected two numbers")
    return [number(each) for each in value]


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed. `harmless`: values of a warned or refused key that have no effect."""

    name: str
    fate: Fate
    note: str  # what becomes of it, for the docs and for the comment in the YAML
    becomes: str = ""  # offload's key
    read: Read = anything
    harmless: tuple[Any, ...] = ()
    also: tuple[str, ...] = ()  # other names of the same key
    followed: bool = False  # by offload.deepspeed: a loop of one's own has to do it
    filled: str = ""  # the argument from which transformers' Trainer fills `auto`


def _mapped(name: str, becomes: str, read: Read, note: str, **more: Any) -> Key:
    return Key(name, Fate.MAPPED, note, becomes, read, **more)


def _unneeded(name: str, note: str, **more: Any) -> Key:
    return Key(name, Fate.UNNEEDED, note, **more)


def _warned(name: str, note: str, *harmless: Any, **more: Any) -> Key:
    return Key(name, Fate.WARNED, note, harmless=(None, *harmless), **more)


def _refused(name: str, note: str, *harmless: Any, **more: Any) -> Key:
    return Key(name, Fate.REFUSED, note, harmless=(None, *harmless), **more)


_BUCKETS = "buckets are one group's gradients or parameters; docs/ranks.md has their bytes"
_ONE_PASS = "gradients are copied once, into flat memory"
_COPIES = "how long copies stay follows from the trace of uses and the budget"
_PIPELINED = "reads, updates and writes always run side by side"
_MEASURED = "nvme.backend and nvme.threads: auto take what works best; `offload bench io` measures"
_OFF = {"enabled": False}

TOP = (
    _mapped(
        "gradient_accumulation_steps", "gradient_accumulation_steps", whole,
        "the number of passes before a step. In a loop of your own divide the loss by it and step "
        "after as many passes; offload.deepspeed does both, as DeepSpeed",
        filled="gradient_accumulation_steps",
    ),
    _mapped(
        "train_batch_size", "gradient_accumulation_steps", whole,
        "divided by the batch per rank and the ranks, where accumulation is not given",
        filled="per_device_train_batch_size x gradient_accumulation_steps x ranks",
    ),
    _mapped(
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", whole,
        "the batch that your loader makes; here only for the division above",
        filled="per_device_train_batch_size",
    ),
    _mapped(
        "gradient_clipping", "clip_grad_norm", number,
        "0: no clipping. Absent: DeepSpeed 0.19.8 clips to 1.0, versions before did not clip",
        filled="max_grad_norm",
    ),
    _mapped(
        "communication_data_type", "zero.reduce_dtype", text,
        "format of gradients between ranks. Absent: fp32 here, the training format in DeepSpeed",
    ),
    _mapped(
        "zero_optimization", "zero.stage", anything, "as the old form true: stage 1; false: 0",
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
    _unneeded("prescale_gradients", "gradients are summed in fp32, which needs no scaling before"),
    _unneeded(
        "gradient_predivide_factor", "gradients are summed in fp32, and divided once at the end"
    ),
    _unneeded("disable_allgather", "the stages of ZeRO gather as docs/ranks.md says"),
    _unneeded("zero_allow_untested_optimizer", "an optimizer without a rule of ours is refused"),
    _unneeded("zero_force_ds_cpu_optimizer", "updates always run in our kernels"),
    _unneeded(
        "steps_per_print",
        "offload.deepspeed logs a line so often, at level INFO; a loop of your own does",
    ),
    _unneeded("dataloader_drop_last", "of your loader; offload.deepspeed's follows it"),
    _unneeded("wall_clock_breakdown", "engine.report() and run folders have times and bytes"),
    _unneeded("memory_breakdown", "engine.report() has bytes per tier"),
    _unneeded("dump_state", "`offload config show` prints every setting"),
    _unneeded("disable_python_gc", "gc.disable() in your loop does it"),
    _unneeded("vocabulary_size", "DeepSpeed only warns about it"),
    _unneeded("log_level", 'logging.getLogger("offload").setLevel(...)'),
    _warned(
        "seq_parallel_communication_data_type",
        "sequence parallelism is the model's own, and so are its formats", "fp32",
    ),
)  # fmt: skip

ZERO = (
    _mapped("stage", "zero.stage", whole, "the same stages; absent: 0, as in DeepSpeed"),
    _mapped("cpu_offload", "placement.optimizer", boolean, "old: offload_optimizer.device: cpu"),
    _mapped(
        "cpu_offload_param", "placement.parameters", boolean, "old: offload_param.device: cpu",
        also=("cpu_offload_params",),
    ),
    _unneeded("cpu_offload_use_pin_memory", "host memory is pinned as it is used, beside a GPU"),
    _mapped(
        "sub_group_size", "optimizer.chunk", whole,
        "elements that are updated in one piece, rounded to a multiple of 1024. DeepSpeed's "
        "default of 1e9 and more become auto: pieces are streamed here",
    ),
    _mapped(
        "prefetch_bucket_size", "prefetch", whole,
        "0: nothing is fetched ahead. Other numbers of elements become auto: as many groups as the "
        "budget holds", also=("stage3_prefetch_bucket_size",),
        filled="the model's hidden size",
    ),
    _mapped(
        "zero_hpz_partition_size", "zero.shard_group", whole,
        "neighbouring ranks that share one copy; here of all states, not of parameters alone",
    ),
    _mapped("mics_shard_size", "zero.shard_group", number, "as MiCS; -1: off"),
    _mapped("offload_param", "placement.parameters", anything, "null: not offloaded"),
    _mapped("offload_optimizer", "placement.optimizer", anything, "null: not offloaded"),
    _unneeded(
        "max_live_parameters", "prefetch: auto keeps as much as budget.device holds; set that, in "
        "bytes, to hold less", also=("stage3_max_live_parameters",),
    ),
    _unneeded("max_reuse_distance", _COPIES, also=("stage3_max_reuse_distance",)),
    _unneeded(
        "param_persistence_threshold", "small parameters belong to their block's group, which "
        "moves as one", also=("stage3_param_persistence_threshold",),
    ),
    _unneeded(
        "model_persistence_threshold", _COPIES, also=("stage3_model_persistence_threshold",)
    ),
    _unneeded(
        "module_granularity_threshold", "groups are whole blocks; groups.blocks names them",
        also=("stage3_module_granularity_threshold",),
    ),
    _unneeded(
        "gather_16bit_weights_on_model_save", "checkpoints hold whole tensors: `offload checkpoint "
        "export FOLDER OUT` writes the weights alone",
        also=(
            "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        ),
    ),
    _unneeded(
        "use_all_reduce_for_fetch_params", "a group is gathered in one call",
        also=("stage3_use_all_reduce_for_fetch_params",),
    ),
    _unneeded(
        "allgather_sequential", "a group is gathered in one call, without a copy",
        also=("stage3_allgather_sequential",),
    ),
    _unneeded("contiguous_gradients", _ONE_PASS),
    _unneeded("reduce_scatter", "each rank gets the sum of its part"),
    _unneeded("reduce_bucket_size", _BUCKETS, filled="the model's hidden size squared"),
    _unneeded("allgather_bucket_size", _BUCKETS),
    _unneeded("allgather_size", _BUCKETS),
    _unneeded("use_multi_rank_bucket_allreduce", _BUCKETS),
    _unneeded("allgather_partitions", "a group is gathered in one call"),
    _unneeded("overlap_comm", "communication always runs beside the backward"),
    _unneeded("round_robin_gradients", _ONE_PASS),
    _unneeded("parameter_alignment", "groups are aligned to pages"),
    _unneeded("compute_grad_norm", "the norm costs nothing: it comes with the copy"),
    _unneeded("load_from_fp32_weights", "checkpoints have the masters, without loss"),
    _unneeded("elastic_checkpoint", "any number of ranks loads a checkpoint"),
    _unneeded("pipeline_loading_checkpoint", "checkpoints are streamed"),
    _unneeded("memory_efficient_linear", "weights are fetched again for backward, never kept"),
    _unneeded("override_module_apply", "model.apply(fn) works as it is"),
    _unneeded("log_trace_cache_warnings", "engine.report() counts hits and misses"),
    _unneeded("enable_sanity_checks", "engine.check_integrity() checks the books"),
    _unneeded("save_muon_momentum_buffer_in_memory", "of Muon, which is refused"),
    _unneeded("aio", "a section that belongs at the top; needs no key there either"),
    _warned(
        "leaf_module", "groups are whole blocks; name others in groups.blocks, as modules whose "
        "branches the ranks choose differently. offload.deepspeed does that for its classes", {},
    ),
    _unneeded("mics_hierarchical_params_gather", "a group is gathered in one call"),
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
    _mapped("device", "placement.parameters", text, "cpu: host; nvme: nvme; none: auto"),
    _mapped("nvme_path", "nvme.paths", text, "a folder for swap files; two different are striped"),
    _mapped(
        "max_in_cpu",
        "budget.host",
        whole,
        "elements, here bytes: with the buffers the most that host memory holds. Only where the "
        "optimizer is on nvme as well, since budget.host is for all states",
    ),
    _mapped("buffer_count", "budget.host", whole, "see max_in_cpu"),
    _mapped("buffer_size", "budget.host", whole, "see max_in_cpu"),
    _unneeded("pin_memory", "host memory is pinned as it is used, beside a GPU"),
)
OFFLOAD_OPTIMIZER = (
    _mapped(
        "device", "placement.optimizer", text,
        "cpu: host, and gradients with it; nvme: nvme; none: auto",
    ),
    _mapped("nvme_path", "nvme.paths", text, "a folder for swap files; two different are striped"),
    _mapped(
        "ratio", "placement.optimizer", number, "the share that is offloaded; the rest: device"
    ),
    _unneeded("buffer_count", "buffers follow from optimizer.chunk"),
    _unneeded("buffer_size", "buffers follow from optimizer.chunk"),
    _unneeded("pin_memory", "host memory is pinned as it is used, beside a GPU"),
    _unneeded("pipeline", _PIPELINED),
    _unneeded("pipeline_read", _PIPELINED),
    _unneeded("pipeline_write", _PIPELINED),
    _unneeded("fast_init", "states are written group by group"),
    _unneeded("super_offload", "updates run behind the next forward on every machine"),
    _unneeded("cpuadam_cores_perc", "threads.optimizer: auto; a number there fixes it"),
)  # fmt: skip
AIO = (
    *(
        _unneeded(name, _MEASURED)
        for name in (
            "block_size", "queue_depth", "intra_op_parallelism", "thread_count", "single_submit",
            "overlap_events",
        )
    ),
    _warned("use_gds", "files are read into host memory, and copied from there", False),
)  # fmt: skip

FP16 = (
    _mapped("enabled", "precision", boolean, "true: fp16", filled="fp16"),
    _mapped("loss_scale", "loss_scale", number, "0: dynamic. A fixed scale: initial and min"),
    _mapped("initial_scale_power", "loss_scale.initial", whole, "2 to this power"),
    _mapped("loss_scale_window", "loss_scale.growth_interval", whole, "steps before it doubles"),
    _mapped(
        "min_loss_scale", "loss_scale.min", number,
        "the smallest scale; an overflow there skips the step, and so many in a row as "
        "`max_skipped_steps` says are an error",
    ),
    _warned(
        "hysteresis", "the scale is halved at the first overflow, as with 1: fewer steps are "
        "skipped at the start", 1,
    ),
    _unneeded("consecutive_hysteresis", "there is no hysteresis"),
    _warned(
        "auto_cast", "cast the inputs in your loop (x.half()); offload.deepspeed does that", False,
        followed=True,
    ),
    _refused(
        "fp16_master_weights_and_grads", "masters of fp16 weights are fp32; remove it", False
    ),
)  # fmt: skip
BF16 = (
    _mapped("enabled", "precision", boolean, "true: bf16", filled="bf16"),
    _mapped(
        "check_grad_overflow", "skip_nonfinite", boolean,
        "steps with infinite or NaN gradients are skipped; absent: true, as in DeepSpeed",
        also=("check_overflow",),
    ),
    _mapped(
        "bf16_master_weights_and_grads", "optimizer.master", boolean,
        "true: none. Weights are rounded stochastically, DeepSpeed rounds to nearest",
    ),
    _mapped("bf16_optimizer_states", "optimizer.states", boolean, "true: bf16"),
    _unneeded("immediate_grad_update", "gradients leave as they come"),
)  # fmt: skip

OPTIMIZER = (
    _mapped(
        "type", "optimizer.type", text,
        "Adam and AdamW: adamw (adam with adam_w_mode: false), Lion, Adagrad, SGD. Others (Lamb, "
        "OneBitAdam, Muon, ...) are refused",
    ),
    _mapped("params", "optimizer", anything, "its numbers; absent ones are DeepSpeed's defaults"),
    _unneeded("legacy_fusion", "there is one kernel"),
)  # fmt: skip
OPTIMIZER_PARAMS = (
    _mapped("lr", "optimizer.lr", number, "", filled="learning_rate"),
    _mapped("betas", "optimizer.betas", pair, "", filled="adam_beta1, adam_beta2"),
    _mapped("eps", "optimizer.eps", number, "", filled="adam_epsilon"),
    _mapped(
        "weight_decay", "optimizer.weight_decay", number, "absent: 0, as in DeepSpeed's kernels",
        filled="weight_decay",
    ),
    _mapped("amsgrad", "optimizer.amsgrad", boolean, ""),
    _mapped("momentum", "optimizer.momentum", number, ""),
    _mapped("dampening", "optimizer.dampening", number, ""),
    _mapped("nesterov", "optimizer.nesterov", boolean, ""),
    _mapped("lr_decay", "optimizer.lr_decay", number, ""),
    _mapped("maximize", "optimizer.maximize", boolean, ""),
    _mapped(
        "adam_w_mode", "optimizer.type", boolean, "false with Adam: adam",
        also=("adamw_mode",),
    ),
    _mapped(
        "torch_adam", "optimizer.weight_decay", boolean,
        "torch's own class: its default of weight_decay for AdamW is 0.01",
    ),
    *(
        _unneeded(name, "our kernels are fused")
        for name in ("fused", "foreach", "capturable", "differentiable", "set_grad_none")
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
        "type", "", text,
        "printed as code, and what offload.deepspeed runs: WarmupLR, WarmupDecayLR, "
        "WarmupCosineLR; a class of torch.optim.lr_scheduler as it is",
    ),
    _mapped("params", "", anything, "its numbers, in that code", filled="warmup_steps, max_steps"),
)  # fmt: skip

ACTIVATION_CHECKPOINTING = (
    _mapped(
        "cpu_checkpointing", "placement.activations.tier", boolean,
        "true: host. All saved activations move, not only the inputs of blocks",
    ),
    _unneeded(
        "partition_activations", "ranks of tensor parallelism keep their own",
        also=("partitioned_activations",),
    ),
    _unneeded("contiguous_memory_optimization", "saved activations go through one window"),
    _unneeded("number_checkpoints", "saved activations go through one window"),
    _unneeded("synchronize_checkpoint_boundary", "streams wait for each other by events"),
    _unneeded("profile", "engine.report() and run folders have times and bytes"),
)  # fmt: skip
DATA_TYPES = (
    _unneeded("grad_accum_dtype", "sums of several passes are fp32; the first pass has its own"),
    _unneeded("param_dtype", "precision decides it; DeepSpeed refuses another one"),
    _warned("buffer_dtype", "buffers keep their format; cast them before initialize"),
    _unneeded("keep_in_fp32_modules", "buffers keep their format"),
)
CHECKPOINT = (
    _unneeded("tag_validation", "ranks compare what they are about to save"),
    _unneeded("checkpoint_serialization", "nothing is pickled"),
    _unneeded("writer", "checkpoints are streamed"),
    _unneeded("use_node_local_storage", "the first rank writes all of a checkpoint"),
    _unneeded("parallel_write", "the first rank writes all of a checkpoint"),
    _refused(
        "load_universal",
        "only checkpoints of ours are loaded; load the weights with weights=",
        False,
    ),
)
TORCH_AUTOCAST = (
    _warned(
        "enabled", "put torch.autocast around the forward; offload.deepspeed does that", False,
        read=boolean, followed=True,
    ),
    _unneeded("dtype", "torch.autocast's"),
    _unneeded("lower_precision_safe_modules", "torch.autocast's own list of operations counts"),
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
OLD_SECTIONS = {"bfloat16": "bf16"}  # old names

# Sections that are looked into no further.
OTHERS = (
    _mapped(
        "offload", "", anything, "not DeepSpeed's, which ignores it: keys of ours, as budget, laid "
        "over what the others become",
    ),
    _warned("flops_profiler", "`memest` and run folders say what a step costs", _OFF),
    _warned("autotuning", "`memest --write FILE` chooses the settings", _OFF),
    _warned("tensorboard", "a logger of engine.offload.watch (docs/watching.md)", _OFF),
    _warned("wandb", "a logger of engine.offload.watch (docs/watching.md)", _OFF),
    _warned("comet", "give engine.offload.watch a function that logs (docs/watching.md)", _OFF),
    _warned("csv_monitor", "a logger of engine.offload.watch (docs/watching.md)", _OFF),
    _warned("monitor_config", "loggers of engine.offload.watch (docs/watching.md)", _OFF),
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
    _refused("sparse_attention", "DeepSpeed has removed it"),
    _refused("compression_training", "DeepSpeed has removed it"),
    _refused("quantize_training", "DeepSpeed has removed it", _OFF),
    _refused("weight_quantization", "weights are not quantized"),
    _refused("eigenvalue", "DeepSpeed has removed it", _OFF),
    _refused("progressive_layer_drop", "DeepSpeed has removed it", _OFF),
    _refused("curriculum_learning", "make the batches in your loop", _OFF),
    _refused("data_efficiency", "make the batches in your loop", _OFF),
)  # fmt: skip
