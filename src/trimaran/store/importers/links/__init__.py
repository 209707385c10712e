"""Measurements of links by other tools, and the cluster file that they are written into."""
