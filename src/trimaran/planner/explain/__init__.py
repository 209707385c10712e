"""Explanations: why a layout ranks where it does, and what would have to change."""
