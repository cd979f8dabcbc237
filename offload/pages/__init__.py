"""HTML pages of one file each: one template, and pictures drawn by matplotlib."""
