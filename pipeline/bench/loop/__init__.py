"""Closed and open loops: sending requests at their times while the clock runs."""
