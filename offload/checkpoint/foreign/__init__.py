"""Checkpoints and weights in other formats: torch.save, safetensors files for the hub."""
