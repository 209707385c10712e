"""Programs that other rooms start: text to tokens, text from a model, checkpoints to Hugging Face folders, dry runs."""
