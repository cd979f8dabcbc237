"""Blocks computed again in backward, and block by block over micro-batches."""
