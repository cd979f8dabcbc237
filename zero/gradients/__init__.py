"""Gradients from backward to the step: accumulators, handles, norms."""
