"""Hooks on modules, saved tensors, and what keeps other machinery of torch out of them."""
