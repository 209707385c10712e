"""Recipes: a study as one TOML file, a module for each of its parts."""
