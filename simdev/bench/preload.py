"""Imported once by the server that worker processes are forked from: whatever it has loaded, no worker loads again."""

from __future__ import annotations

import contextlib

from simdev.bench.guard import die_with_parent
from simdev.bench.provenance import circumstances
from simdev.bench.warm import warm

die_with_parent()
circumstances()  # asks Git once, not for every run
with contextlib.suppress(Exception):  # the worker that needs the broken part reports it
    warm()
