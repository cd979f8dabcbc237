"""The speed of this machine, and the memory that a process takes."""
