"""A report as one HTML page: page fills the template, plots draws, axes chooses scales."""
