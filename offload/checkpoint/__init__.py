"""Checkpoints: a folder of safetensors files and a manifest, complete or absent.

    step-000100/
        manifest.json                   names, shapes, steps, numbers, XXH3 of every file's blocks
        parameters/000.safetensors      one file per group: true names and shapes, model precision
        optimizer/000.safetensors       NAME.exp_avg, NAME.exp_avg_sq, NAME.low or NAME.master, ...
        buffers.safetensors             persistent buffers (others are the model's code to rebuild)
        run.safetensors                 what goes on beside the engine: generators, ...

Nothing in it says where a state lived or how it was cut into chunks: it loads under any placement,
budget, chunk size and grouping. There is no file that names the latest
checkpoint: a folder without a suffix is complete, so there is nothing that could disagree with it.
"""

from __future__ import annotations

from offload.checkpoint.format.steps import latest, prune, step_path

__all__ = ["latest", "prune", "step_path"]
