"""Measuring a server of language models: Triton over gRPC and HTTP, and whatever speaks OpenAI's API, by one set of
definitions.

    options     what is asked for
    work/       when requests leave, and what they ask
    wire/       their bytes, and how these reach the server
    exchange    one request while the clock runs: bytes and stamps
    closed_loop, open_loop  when they leave, by absolute time (alarm); driver is what both have in common
    records     exchanges, read after the run, as columns
    metrics     records -> numbers; slo, series and verdict judge and draw them; server_side is the server's own word
    report      all of it as a value; files writes it, page/ draws it
    level, hand    one load over one protocol; what a process does of it (share)
    processes, hosts  hands in processes of their own, and on other machines
    search, repeats   the highest load that meets objectives; figures over repeated runs
    run         all levels in order, by one hand or several
    against/    reports side by side
    known/      a server of known timing; selftest holds the client against it

Knows URLs, nothing about engines or stores. Importing this package loads none of it.
"""
