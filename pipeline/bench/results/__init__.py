"""Records of a run, metrics of records, reports of metrics."""
