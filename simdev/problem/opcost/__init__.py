"""What one op takes on one accelerator: its parts (matrix products, convolutions, passes over memory), the physics of
each part, what measurements add to it, and the device files that hold the measurements' figures.

Everything here is exact IEEE arithmetic on ``+ - * /`` and comparisons, so that equal inputs give equal nanoseconds
on every machine; no function of a mathematics library is called on the way to a cost.
"""
