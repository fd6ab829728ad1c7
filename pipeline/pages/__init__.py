"""HTML pages that need neither network nor script."""
