"""States: pieces of memory with a home in a tier, and copies in slots."""
