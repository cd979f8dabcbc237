"""What is shown while something runs: a panel, lines, progress. No thread: the loop draws."""
