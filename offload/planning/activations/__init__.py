"""What one forward and backward pass takes, found by running it without values."""
