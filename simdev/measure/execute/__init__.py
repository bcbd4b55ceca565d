"""The step for real: a captured training step under a placement on real devices, measured.

:func:`~simdev.measure.execute.record.record` runs a step once and writes down its ATen calls;
:func:`~simdev.measure.execute.host.execute` runs them under a placement, one process per device;
:mod:`~simdev.measure.execute.measure` turns what they measured into a :class:`~simdev.sim.Schedule`. Needs PyTorch (the
``capture`` extra) and Linux.
"""
