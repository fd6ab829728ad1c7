"""Monitors that run during a load: metrics of the server, GPUs of this machine."""
