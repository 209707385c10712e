"""Fit: efficiencies learned from measured rows."""
