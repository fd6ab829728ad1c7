"""Starting, watching and stopping tritonserver, and asking it."""
