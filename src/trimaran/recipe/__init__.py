"""Recipes: one TOML file each, and a module for each of its parts."""
