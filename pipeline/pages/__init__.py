"""HTML pages that ask the network for nothing and can be read without script."""
