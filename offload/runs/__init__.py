"""The folder of a run: its prediction, a line per step, its measurement, its checkpoints."""
