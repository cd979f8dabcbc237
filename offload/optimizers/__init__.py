"""Optimizers as a training loop sees them."""
