"""HTML pages of one file each, of one template, and curves drawn by matplotlib."""
