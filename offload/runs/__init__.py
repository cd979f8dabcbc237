"""One run's folder: what was predicted, a line per step, what was measured, its checkpoints."""
