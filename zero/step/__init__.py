"""The sharded optimizer: steps, updates, and the states of each chunk."""
