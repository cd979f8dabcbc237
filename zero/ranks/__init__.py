"""Several ranks: shards, collectives, and what names a rank that is missing."""
