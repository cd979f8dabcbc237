"""A step: its program, what it moves and holds, and how long it takes."""
