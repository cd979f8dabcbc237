"""The memory and time that a run takes, and where its states should live, before it starts."""
