"""Imported once by the server that worker processes are forked from: whatever it has loaded, no worker loads again."""

from __future__ import annotations

import contextlib
import signal

# Ctrl-C is for the process that waits for answers; this one was started with it blocked (simdev.bench.workers).
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

from simdev.bench.guard import die_with_parent  # noqa: E402
from simdev.bench.provenance import circumstances  # noqa: E402
from simdev.bench.warm import warm  # noqa: E402

die_with_parent()
circumstances()  # asks Git once, not for every run
with contextlib.suppress(Exception):  # the worker that needs the broken part reports it
    warm()
