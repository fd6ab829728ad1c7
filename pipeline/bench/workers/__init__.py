"""Workers: the processes that drive a load, on this machine and on others."""
