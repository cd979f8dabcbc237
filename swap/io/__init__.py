"""Swap files and the backends that read and write them."""
