"""The process and its machine: memory, signals, child processes."""

__version__ = "0.1.0"  # of offload
