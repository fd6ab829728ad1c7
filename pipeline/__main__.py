"""`python -m pipeline` is the trtpipe command, for where its script is not on PATH."""

from pipeline.cli import main

main()
