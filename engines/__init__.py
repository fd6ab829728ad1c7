"""Weights in, engine out. The only package that may touch torch, and it does so in child processes."""
