"""Results and schedules for people: tables, the leaderboard page, explanations, pictures and trace files.

Nothing here changes a result.
"""
