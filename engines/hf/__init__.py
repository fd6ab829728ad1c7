"""Hugging Face model folders: reading, checking and writing them."""
