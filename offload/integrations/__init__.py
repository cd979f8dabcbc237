"""Offload inside other libraries. Each module imports its library, and only that; nothing else of
offload does."""
