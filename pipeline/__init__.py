"""A run: what to do, in what order, what is already done."""

__version__ = "0.1.0"
