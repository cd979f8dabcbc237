"""The tiers of one engine: which memory and files there are, and what is given to whom."""
