"""Text: documents, tokens, and which sample comes when."""
