"""Studies: a recipe measured, tuned and trained for real, in a folder of its own."""
