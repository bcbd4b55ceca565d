"""What all plans of one job share, so that it is computed once: prices, captured stages and timed segments."""

from __future__ import annotations

from typing import Any

from simdev.planners.job import Job


class SharedByPlans:
    """A job, the prices of its kernels and collectives, and what is known of its programs by keys of those who compute
    it: stages as captured from PyTorch, segments as timed."""

    def __init__(self, job: Job):
        self.job = job
        self.prices = job.software.prices(job.cluster)
        self.known: dict[tuple, Any] = {}
