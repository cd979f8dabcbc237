"""A checkpoint's files and folder. Nothing in here knows an engine."""
