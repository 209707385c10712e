"""`python -m trimaran` is the `trimaran` command."""

from trimaran.cli import main

main()
