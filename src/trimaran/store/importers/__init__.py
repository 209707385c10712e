"""Importers: logs and tables of others as rows of the table contract. Nothing read here is ever executed."""
