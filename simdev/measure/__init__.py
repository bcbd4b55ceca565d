"""Measured truth: calibration of device files, execution of placements on real devices, and comparisons with both.

``calibrate`` fits device files to public tables, ``execute`` runs placements, ``compare`` reports on them.
"""
