"""A step: its program, the bytes that it moves and holds, and its duration."""
