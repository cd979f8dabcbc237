"""The names of DeepSpeed that are left out here, and what to use in place of some."""

from __future__ import annotations

from offload.tiers.errors import UnsupportedError

_PARALLEL = "with mesh= of offload.initialize"
_INSTEAD = {
    "allreduce_gradients": "nothing: gradients are reduced in backward",
    "coalesce_grad_reduction": "engine.no_sync()",
    "scale": "engine.backward(loss), which scales it",
    "managed_gradient_accumulation": "set_gradient_accumulation_boundary",
    "set_train_batch_size": "a new configuration, or set_gradient_accumulation_boundary",
    "set_train_micro_batch_size": "a new configuration",
    "get_mom": "engine.optimizer.param_groups",
    "get_type": "engine.optimizer.param_groups",
    "dynamic_loss_scale": "engine.loss_scale()",
    "timers": "engine.offload.report()",
    "flops_profiler": "`memest`",
    "basic_optimizer": "engine.optimizer",
    "client_optimizer": "engine.optimizer",
    "eval_batch": "engine(...) under torch.no_grad()",
    "register_compile_pass": "engine.compile()",
    "deepspeed_io": "training_data= of initialize, or a torch DataLoader",
    "train_batch": "forward, backward and step; pipelines: torch.distributed.pipelining",
    "module_state_dict": "engine.module.state_dict()",
    "load_module_state_dict": "engine.module.load_state_dict(...)",
    "offload_states": "zero_optimization.offload_optimizer: states at home there leave the device "
    "by themselves after each use",
    "reload_states": "nothing: states are fetched where they are used",
    "empty_partition_cache": "nothing: copies are dropped when their memory is needed",
    "save_fp16_model": "save_16bit_model",
    "checkpointing": "torch.utils.checkpoint, which restores random numbers",
    "init_inference": "the model itself; weights stay in their tiers while it computes",
    "PipelineModule": f"torch.distributed.pipelining, {_PARALLEL}",
    "tp_model_init": f"parallelize_module, {_PARALLEL}",
    "moe": "offload.moe.MoE; param groups need no split for its experts",
    "OnDevice": "torch.device(...) as a context, or deepspeed.zero.Init",
    "TiledLinear": "torch.nn.Linear: its weight is fetched for its own use alone",
    "runtime": "the configuration's optimizer and scheduler sections",
    "groups": "torch.distributed",
    "register_external_parameter": "nothing: a parameter can be used in any module's forward",
    "set_z3_leaf_module": "groups.blocks, with the module's class",
    "get_z3_leaf_modules": "model.modules()",
    "RepeatingLoader": "a loop over epochs",
    "gradient_clipping": "engine.offload.config.clip_grad_norm",
    "zero_optimization": "zero_optimization_stage",
    "zero_optimization_partition_weights": "zero_optimization_stage",
    "fp16_enabled": "engine.offload.config.precision",
    "bfloat16_enabled": "engine.offload.config.precision",
    "optimizer_name": "engine.offload.config.optimizer.type",
    "profiling": "`memest`",
    "monitor": "engine.offload.report()",
    "zero_to_fp32": "`offload checkpoint export SAVE_DIR/TAG OUT.safetensors --dtype fp32`",
    "safe_get_local_grad": "safe_get_full_grad",
    "safe_get_local_fp32_param": "safe_get_full_fp32_param",
    "safe_get_local_optimizer_state": "safe_get_full_optimizer_state",
}


class LeftOutError(UnsupportedError, AttributeError):
    """An engine has no such method or attribute: `hasattr` is False."""


def left_out(where: str, name: str) -> Exception:
    """Return the error for a name that `where` does not have: UnsupportedError that says what to
    use for one of DeepSpeed's, AttributeError for others."""
    message = f"{where} has no {name!r}"
    if name in _INSTEAD:
        return UnsupportedError(f"{message}; use {_INSTEAD[name]}")
    return AttributeError(f"{message} (docs/deepspeed.md lists what is there)")
