"""The process and its machine: memory, signals, child processes."""
