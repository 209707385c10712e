"""Effects: causes of time and memory, each a function of a case and a grid of layouts."""
