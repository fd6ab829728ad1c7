"""`python -m pipeline` is the trtpipe command, for where its script is not on PATH."""

import sys

if sys.modules["__main__"].__dict__ is globals():
    # `-m` has put the current folder first. trtpipe_launch.py lies beside this package, and is looked for there alone.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = __file__.rpartition("/pipeline/")[0]
        import trtpipe_launch  # noqa: F401

        del sys.path[0]
    from trtpipe_launch import main
else:  # trtpipe_launch.py runs this file
    from pipeline.cli import main

main()
