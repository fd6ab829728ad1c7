"""`python -m pipeline` is the trtpipe command, for where its script is not on PATH."""

import sys

# `-m` has put the current folder first. trtpipe_launch.py lies beside this package, and looks for it there.
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = __file__.rpartition("/pipeline/")[0]
from trtpipe_launch import main

main()
