"""The report of `trtpipe prove`: what held on a machine, and what did not."""
