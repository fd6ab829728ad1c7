"""Where the program of a stage runs, what the machine can do, and why a program failed."""
