"""A study is a recipe worked on in a folder: measured, tuned, trained."""
