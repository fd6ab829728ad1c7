"""What a load is made of: when requests leave, and what they ask. No sockets, no clock; a seed fixes all of it.

loads, arrivals   closed and open loops, stages and traces; the times of their requests
work, workload    what is asked for, and the prompts made of it
lengths, texts    distributions of lengths; texts of exactly so many tokens
prompt_files, trace, lines   what is read from files
seeds             streams of random numbers
"""
