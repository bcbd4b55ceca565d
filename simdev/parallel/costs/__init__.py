"""What a rank program costs: kernels, collectives, hosts, their overlap, and the memory that a rank reserves."""
