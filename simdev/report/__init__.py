"""Reports for people: tables and the HTML page of a leaderboard, and one schedule as text, picture or trace file.

The modules read results, graphs and schedules and change none of them. :class:`Explanation` and :func:`explain` compute
what ``simdev explain`` prints. :func:`write_page` and :func:`draw` write the files of ``simdev leaderboard --html`` and
``simdev view``.
"""

from simdev.report.explain import Explanation, Finding, explain
from simdev.report.page import write_page
from simdev.report.perfetto import plan_trace_events, trace_events, write_trace
from simdev.report.timeline import draw

__all__ = [
    "Explanation",
    "Finding",
    "draw",
    "explain",
    "plan_trace_events",
    "trace_events",
    "write_page",
    "write_trace",
]
