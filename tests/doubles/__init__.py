"""Stand-ins for programs that need an NVIDIA GPU: each enforces its program's contract and does none of its work."""
