"""Bridges to other libraries: Gymnasium environments, and device maps and pipeline splits for PyTorch."""
