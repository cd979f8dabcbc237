"""The names of DeepSpeed that are left out here, and what to use in their place."""

from __future__ import annotations

from offload.tiers.errors import UnsupportedError

_EXPERTS = "offload.moe.MoE; param groups need no split for its experts"
_PARALLEL = "with mesh= of offload.initialize"
_REPORT = "engine.offload.report()"
_WHOLE = "the function with `full` in its name"
LEFT_OUT = {
    # methods and attributes of an engine
    "allreduce_gradients": "nothing: gradients are reduced in backward",
    "buffered_allreduce_fallback": "nothing: gradients are reduced in backward",
    "coalesce_grad_reduction": "engine.no_sync()",
    "scale": "engine.backward(loss), which scales it",
    "managed_gradient_accumulation": "set_gradient_accumulation_boundary",
    "set_train_batch_size": "a new configuration, or set_gradient_accumulation_boundary",
    "set_train_micro_batch_size": "a new configuration",
    "get_mom": "engine.optimizer.param_groups",
    "get_type": "engine.optimizer.param_groups",
    "deepspeed_io": "training_data= of initialize, or a torch DataLoader",
    "train_batch": "forward, backward and step; pipelines: torch.distributed.pipelining",
    "eval_batch": "engine(...) under torch.no_grad()",
    "flops_profiler": "`memest`",
    "timers": _REPORT,
    "tput_timer": _REPORT,
    "get_wall_clock_timers": _REPORT,
    "basic_optimizer": "engine.optimizer",
    "client_optimizer": "engine.optimizer",
    "register_compile_pass": "engine.compile()",
    "module_state_dict": "engine.module.state_dict()",
    "load_module_state_dict": "engine.module.load_state_dict(...)",
    "dynamic_loss_scale": "engine.loss_scale()",
    "offload_states": "zero_optimization.offload_optimizer: states at home there leave the device "
    "by themselves after each use",
    "reload_states": "nothing: states are fetched where they are used",
    "empty_partition_cache": "nothing: copies are dropped when their memory is needed",
    "save_fp16_model": "save_16bit_model",
    # names of modules
    "checkpointing": "torch.utils.checkpoint, which restores random numbers",
    "init_inference": "the model itself; weights stay in their tiers while it computes",
    "InferenceEngine": "the model itself",
    "inference": "the model itself",
    "PipelineModule": f"torch.distributed.pipelining, {_PARALLEL}",
    "pipe": f"torch.distributed.pipelining, {_PARALLEL}",
    "tp_model_init": f"parallelize_module, {_PARALLEL}",
    "module_inject": f"parallelize_module, {_PARALLEL}",
    "sequence": f"torch's context parallelism, {_PARALLEL}",
    "moe": _EXPERTS,
    "runtime": "the configuration's optimizer and scheduler sections",
    "monitor": _REPORT,
    "profiling": "`memest`",
    "compression": "nothing: DeepSpeed has removed it",
    "elasticity": "a checkpoint, which any number of ranks can load",
    "OnDevice": "torch.device(...) as a context, or deepspeed.zero.Init",
    "DeepSpeedTransformerLayer": "the model's own layers",
    "TiledLinear": "torch.nn.Linear: its weight is fetched for its own use alone",
    "lion": 'the configuration\'s section: {"optimizer": {"type": "Lion"}}',
    "adagrad": "torch.optim.Adagrad",
    "groups": "torch.distributed",
    "register_external_parameter": "nothing: a parameter can be used in any module's forward",
    "unregister_external_parameter": "nothing: a parameter can be used in any module's forward",
    "unwrap_model_for_generation": "engine.module: it generates without being unwrapped",
    # functions of deepspeed.utils
    "safe_get_local_grad": _WHOLE,
    "safe_set_local_grad": _WHOLE,
    "safe_get_local_fp32_param": _WHOLE,
    "safe_set_local_fp32_param": _WHOLE,
    "safe_get_local_optimizer_state": _WHOLE,
    "safe_set_local_optimizer_state": _WHOLE,
    "safe_update_full_grad_vectorized": "safe_get_full_grad and safe_set_full_grad",
    "set_z3_leaf_modules_by_name": "set_z3_leaf_modules, with the modules' classes",
    "set_z3_leaf_modules_by_suffix": "set_z3_leaf_modules, with the modules' classes",
    "unset_z3_leaf_modules": "set_z3_leaf_module(module, False)",
}


class LeftOutError(UnsupportedError, AttributeError):
    """An engine has no such method or attribute: `hasattr` is False."""


def left_out(where: str, name: str) -> Exception:
    """Return the error for a name that `where` does not have: UnsupportedError that says what to
    use for one of DeepSpeed's, AttributeError for others."""
    message = f"{where} has no {name!r}"
    if name in LEFT_OUT:
        return UnsupportedError(f"{message}; use {LEFT_OUT[name]}")
    return AttributeError(f"{message} (docs/deepspeed.md lists what is there)")
