"""The Python API, which `trtpipe` re-exports and the command line is built on. One module for each verb.

Importing this package loads none of its modules, and each function imports what it needs when it is called.
"""
