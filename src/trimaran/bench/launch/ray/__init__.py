"""The Ray launcher: its connection, the nodes that Ray gives, and the ranks there."""
