"""Loads of a benchmark: arrival times and requests. No sockets and no clock; a seed determines everything.

loads, arrivals   closed and open loops, stages and traces; the times of their requests
work, workload    description of the requests, and the requests made from it
lengths, texts    distributions of lengths; texts with an exact number of tokens
prompt_files, trace, lines   readers of input files
seeds             random number generators
"""
