"""Tool calls: check of the fields of a request that offer tools, and parsers of the calls that models write as text."""
