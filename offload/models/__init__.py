"""The engine's changes to a model, and the state and values that it gives back."""
