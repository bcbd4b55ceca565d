"""What can be said of a problem without simulating it: levels, critical paths, lower bounds and coarser graphs.

Placers use levels and coarse graphs; leaderboards use the bounds. Every bound here is proven for all placements.
"""
