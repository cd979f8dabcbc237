"""Copies to and from a device, and states in its memory."""
