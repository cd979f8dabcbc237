"""Keys and values in tiers: pages, their store, and the cache of transformers on them."""
