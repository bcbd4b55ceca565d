"""The fidelity report: predictions of kernels, steps and memory beside measurements that were not fitted to."""
