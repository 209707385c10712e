"""Report: the store and the plan as tables."""
