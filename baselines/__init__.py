"""Placers: one file each; see simdev.placers.placer for how to add one."""
