"""What a deployment will need and do, before it is paid for: memory, speed, cost."""
