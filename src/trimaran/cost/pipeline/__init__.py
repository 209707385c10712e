"""Pipelines: the time of a schedule, in closed form and played event by event."""
