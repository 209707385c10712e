"""Placement: on which devices of a cluster whose nodes or links differ the ranks of a layout stand best."""
