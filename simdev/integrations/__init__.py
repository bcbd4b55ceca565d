"""simdev inside other programs: environments for reinforcement learning, device maps and pipeline splits for PyTorch.

:mod:`simdev.integrations.gymnasium` registers the environments ``simdev/Placement-v0`` and
``simdev/PlacementOneShot-v0``; it needs the ``env`` extra and is therefore not imported here.
:mod:`simdev.integrations.torch_map` turns a placement of ops into a placement of modules.
"""

from simdev.integrations.torch_map import device_map, write_device_map

__all__ = ["device_map", "write_device_map"]
