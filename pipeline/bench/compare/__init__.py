"""Comparison of reports, of this load generator and of other tools.

comparison   two or more reports against the first; pairing finds the load points that match
differences  what differs between the runs besides the results
conditions   `--fail-if` expressions
bootstrap    confidence intervals from every request, read by request_files
importers/   results of AIPerf and vLLM as reports like ours
"""
