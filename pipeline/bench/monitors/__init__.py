"""Monitors beside a load: the metrics of the server, the GPUs of this machine."""
