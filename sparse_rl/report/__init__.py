"""A run as a page: what it wrote, as curves, verdicts, trajectories and maps of what every head still sees."""
