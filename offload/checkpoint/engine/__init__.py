"""Saving an engine into a checkpoint, and loading it."""
