"""Placers: one file each; see simdev.placer for how to add one."""
