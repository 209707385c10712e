"""The Slurm launcher: its queue, its nodes and the ranks there."""
