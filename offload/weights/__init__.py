"""Weights on their way into the tiers: of files, of modules that are made, of packed experts."""
