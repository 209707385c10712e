"""Layouts whose ranks stand on given devices of nodes that differ, or whose links do."""
