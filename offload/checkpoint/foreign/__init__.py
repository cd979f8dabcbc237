"""Checkpoints and weights in other formats: torch.distributed.checkpoint, torch.save, safetensors
files for the hub."""
