"""Trials: layouts run for real as processes, watched, and measured into the store."""
