"""A run: one rank from its job file to its result."""
