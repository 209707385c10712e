"""Memory of one rank, in named parts (bytes): what is counted exactly, and what the allocator adds."""
