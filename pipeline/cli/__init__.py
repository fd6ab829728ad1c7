"""The trtpipe command: one module for each group of commands, and the console."""
