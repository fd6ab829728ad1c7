"""Parts of the reference runtime that only a GPU needs."""
