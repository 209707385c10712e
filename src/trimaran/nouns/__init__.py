"""Nouns: what is trained, on what, with what, under which circumstances, and what was measured."""
