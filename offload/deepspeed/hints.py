"""The parts of DeepSpeed that are missing here, and what to use in their place."""

from __future__ import annotations

_METHODS = {
    "allreduce_gradients": "nothing: gradients are reduced in backward",
    "buffered_allreduce_fallback": "nothing: gradients are reduced in backward",
    "deepspeed_io": "training_data= of initialize, or a torch DataLoader",
    "train_batch": "forward, backward and step; pipelines: torch.distributed.pipelining",
    "eval_batch": "engine(...) under torch.no_grad()",
    "monitor": "engine.report()",
    "flops_profiler": "`memest`",
    "timers": "engine.report()",
    "tput_timer": "engine.report()",
    "get_wall_clock_timers": "engine.report()",
    "basic_optimizer": "engine.optimizer",
    "client_optimizer": "engine.optimizer",
    "register_compile_pass": "engine.compile()",
    "module_state_dict": "engine.module.state_dict()",
    "load_module_state_dict": "engine.module.load_state_dict(...)",
    "dynamic_loss_scale": "engine.loss_scale()",
}
_NAMES = {
    "init_inference": "the model itself; weights stay in their tiers while it computes",
    "InferenceEngine": "the model itself",
    "PipelineModule": "torch.distributed.pipelining, with mesh= of offload.initialize",
    "pipe": "torch.distributed.pipelining, with mesh= of offload.initialize",
    "tp_model_init": "parallelize_module, with mesh= of offload.initialize",
    "module_inject": "parallelize_module, with mesh= of offload.initialize",
    "sequence": "torch's context parallelism, with mesh= of offload.initialize",
    "runtime": "the configuration's optimizer and scheduler sections",
    "monitor": "engine.report()",
    "profiling": "`memest`",
    "inference": "the model itself",
    "compression": "nothing: DeepSpeed has removed it",
    "elasticity": "a checkpoint, which any number of ranks can load",
    "OnDevice": "torch.device(...) as a context, or deepspeed.zero.Init",
    "DeepSpeedTransformerLayer": "the model's own layers",
    "TiledLinear": "torch.nn.Linear: its weight is fetched for its own use alone",
    "get_cuda_rng_tracker": "torch.utils.checkpoint, which restores random numbers",
    "model_parallel_cuda_manual_seed": "torch.manual_seed",
}


def missing_method(name: str) -> str:
    """Return the message of the AttributeError for a missing method of an engine."""
    hint = f"; use {_METHODS[name]}" if name in _METHODS else ""
    return f"neither offload.deepspeed's engine nor its model has {name!r}{hint}"


def missing_name(module: str, name: str) -> str:
    """Return the message of the AttributeError for a missing name of a module."""
    hint = f"; use {_NAMES[name]}" if name in _NAMES else ""
    return f"{module} has no {name!r}{hint} (docs/deepspeed.md lists what is there)"
