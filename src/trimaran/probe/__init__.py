"""Probe: measures this machine into a cluster file. `python -m trimaran.probe -o cluster.toml`."""
