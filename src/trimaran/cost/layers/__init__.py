"""What a layer costs on one rank: its operators, its sums over TP and its exchanges of tokens."""
