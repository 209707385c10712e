"""A mixture of experts in place of an MLP: its router, the exchange of its tokens, its experts."""
