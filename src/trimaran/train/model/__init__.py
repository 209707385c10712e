"""The model: transformers, cut over tensor-parallel ranks."""
