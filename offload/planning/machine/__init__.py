"""The speed of this machine, its free room, and the memory that a process takes."""
