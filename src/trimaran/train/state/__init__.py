"""State: checkpoints and weights, from and to folders."""
