"""Integrations with other libraries. Each module imports its library and no other one; the rest of
offload imports none of them."""
