"""Configurations of other trainers read as a layout, and what that would cost; the way back of `export`."""
