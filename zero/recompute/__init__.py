"""Blocks computed again in backward."""
