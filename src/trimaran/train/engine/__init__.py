"""The engine: pipelines played, gradients summed, weights stepped."""
