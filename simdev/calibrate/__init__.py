"""Costs that come from measurement: readers of measured data, the split into fitting and judging, and the fits."""
