"""Systems that run in a process, and where need be an interpreter, of their own; each module is one.

They are started as `python -m benchmarks.workers.NAME` and speak JSON lines: a line that names their precision, then
for every line of asks a line of answers. What each needs beyond Python is imported in its own module alone.
"""
