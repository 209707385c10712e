"""What a cluster is made of: devices, links, groups of nodes, and what a probe measured of them."""
