"""Shaped networks: nodes as network namespaces of this machine, joined by a switch with delay and rate."""
