"""Closed and open loops, which send requests at their times while the clock runs."""
