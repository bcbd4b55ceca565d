"""simdev: a discrete-event simulator and benchmark suite for DNN device placement."""

from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

# The shelves install as simdev.workloads and simdev.baselines; in an uninstalled checkout they lie beside this folder.
if _find_spec("simdev.workloads") is None and (_Path(__file__).parents[1] / "workloads" / "__init__.py").is_file():
    __path__.append(str(_Path(__file__).parents[1]))
