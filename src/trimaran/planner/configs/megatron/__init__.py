"""Megatron-LM's and Megatron-DeepSpeed's arguments as a layout."""
