"""The model: pre-norm transformers, cut over tensor-parallel ranks."""
