"""One trial: a layout run once, for real, and the row that comes of it."""
