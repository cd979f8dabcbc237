"""Choosing a placement, saying why, and holding it against what came."""
