"""Runs a captured training step under a placement on real devices, and measures it.

:func:`~simdev.measure.execute.record.record` runs a step once and records its ATen calls.
:func:`~simdev.measure.execute.host.execute` runs these calls under a placement, with one worker process per device.
:mod:`~simdev.measure.execute.outcome` turns the measured times into a :class:`~simdev.sim.Schedule` and proves that the
placement computed the right result. PyTorch (the ``capture`` extra) and Linux are required.
"""
