"""Communication: which ranks a rank talks to, and how."""
