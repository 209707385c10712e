"""Training for real: ranks that are started, watched, and started again after a fault, to the last step."""
