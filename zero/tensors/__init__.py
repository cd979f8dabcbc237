"""Parameters while their values are in a tier."""
