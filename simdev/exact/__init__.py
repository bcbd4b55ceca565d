"""Exact placement: the maximum-load model, its dynamic program and integer programs, constraint programs, bounds."""
