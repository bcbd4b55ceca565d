"""The bench: it plans runs, executes each in a process of its own, writes a row for every run and verifies rows.

A folder of results is a journal and the tables that are derived from it. The seed of a run follows from its key, so
that any row can be computed again alone.
"""
