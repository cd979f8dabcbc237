"""What the engine does to a model and gives back: its state, its structure, its values."""
