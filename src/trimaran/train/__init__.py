"""Trains a GPT on torch.distributed, on any mix of data, tensor and pipeline parallelism."""
