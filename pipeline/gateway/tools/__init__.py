"""Tool calls: checks of tools and of calls in the history, and parsers of the calls that models write as text."""
