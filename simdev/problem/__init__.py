"""What a placer receives: the graph, the topology, the costs and the rules, joined in a :class:`Problem`.

A graph, a topology and a problem are frozen and checked once, when they are built. Costs are whole nanoseconds, from
measured tables, device files or rooflines. A placement names a device for each op.
"""
