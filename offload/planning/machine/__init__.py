"""How fast this machine is, what it has room for, and what a process takes of it."""
