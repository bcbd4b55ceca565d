"""The placers, one file each. Files that begin with ``_`` hold what several placers share.

Each placer cites its paper and says where it departs from it. CONTRIBUTING.md explains how to add one.
"""
