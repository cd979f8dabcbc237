"""KV caches of transformers in tiers."""
