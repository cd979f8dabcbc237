"""Choosing a placement, explaining it, and comparing it with measurements."""
