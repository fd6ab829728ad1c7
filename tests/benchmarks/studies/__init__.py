"""The questions of the two studies, answered by the planner: `python -m tests.benchmarks.studies`."""
