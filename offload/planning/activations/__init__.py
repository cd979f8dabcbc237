"""The memory and work of one forward and backward pass, found by running it without values."""
