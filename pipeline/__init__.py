"""The staged pipeline, and what a user runs around it."""
