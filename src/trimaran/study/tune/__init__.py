"""Tune: plan, measure, fit, until the fastest layout is known."""
