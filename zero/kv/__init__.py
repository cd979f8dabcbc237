"""KV caches in pages."""
