"""Trimaran: the fastest way to train a given transformer on a given cluster, proved by measurement."""

__version__ = "0.1.0"
