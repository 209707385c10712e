"""The search: candidates, what sieves them, and what ranks them."""
