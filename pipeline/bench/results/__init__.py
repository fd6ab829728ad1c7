"""Results of a run: records, metrics computed from records, reports made of metrics."""
