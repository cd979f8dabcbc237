"""HTML pages of one file each, of one template."""
