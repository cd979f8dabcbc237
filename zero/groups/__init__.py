"""Parameter groups: which there are, where each parameter lies, and what fetches them."""
