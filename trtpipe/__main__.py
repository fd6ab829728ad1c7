"""`python -m trtpipe` is the trtpipe command, for where its script is not on PATH."""

import sys

if sys.modules["__main__"].__dict__ is globals():
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # `-m` has put the current folder first
    from trtpipe.launch import main
else:  # launch.py runs this file
    from trtpipe.pipeline.cli.app import main

main()
