"""HTML pages of one file each: their frame, colours, axes and inline drawings."""
