"""Load tester of language model servers: Triton over gRPC and HTTP, and servers of OpenAI's API.

    options.py    what a benchmark is asked to do, checked
    run.py        one run: every load point in order, by one worker or several; search.py, the highest load within SLOs
    run.py        one run: every load point in order, by one worker or several; search.py, the highest load that is good
    protocols/    codecs (bytes of requests and answers) and senders (which move them)
    loop/         closed and open loops: requests in flight, started at absolute times
    workers/      the processes that drive a load
    monitors/     the server's metrics and this machine's GPUs, read beside the load
    results/      records -> metrics -> report; its files and page
    compare/      reports side by side, those of other tools too (importers/)
    mock_server/  a server of known timing; selftest.py measures the client against it

It knows URLs, nothing about engines or stores. Importing this package loads none of it.
"""
