"""A table of rows: each answered or refused, and scored by group."""
