"""Lines and tables for a terminal, and the progress of running work. No thread: the loop prints."""
