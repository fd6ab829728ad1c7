"""Execution of a stage's program: executors, checks of the machine, and diagnosis of failures."""
