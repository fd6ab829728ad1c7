"""What we know: YAML only. This file makes the folder package data, so that no stray configs/ can replace it."""
