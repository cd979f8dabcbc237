"""Experts in packed parameters."""
