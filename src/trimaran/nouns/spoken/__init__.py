"""What others say of a run: the words of their rows, and how their cells are printed."""
