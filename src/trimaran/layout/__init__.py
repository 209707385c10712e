"""Layouts: one way to lay a workload on a cluster - its degrees, choices, rules, notation and schedules."""
