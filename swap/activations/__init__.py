"""Saved activations away from the device between forward and backward."""
