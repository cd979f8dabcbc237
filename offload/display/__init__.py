"""Panels, lines and progress bars for running work. No thread: the loop draws."""
