"""Threads, what they wait for, and what was recorded of them."""
