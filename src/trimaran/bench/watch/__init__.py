"""Watching a trial: signs of life, memory, evidence, and the verdict."""
