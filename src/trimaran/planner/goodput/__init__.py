"""Goodput: how long a training takes on machines that fail, and what it spends that time on."""
