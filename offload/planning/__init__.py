"""What a run will take, and where everything should live: known before the first byte."""
