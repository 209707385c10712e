"""Trains transformers (GPT, BLOOM, Llama, mixtures of experts) on torch.distributed, on every layout."""
