"""Files: nouns by catalogue name or path, tables of measured rows, Hugging Face configurations."""
