"""Operators: what one kernel does for one micro-batch on one rank."""
