"""Load generator for language model servers: Triton over gRPC and HTTP, and servers of OpenAI's API.

    options.py    validated options of a benchmark
    run.py        one run: every load point in order, by one worker or several; search.py, the highest load within SLOs
    protocols/    codecs (bytes of requests and answers) and senders (which move them)
    loop/         closed and open loops: requests in flight, started at absolute times
    workers/      the processes that drive a load
    monitors/     the server's metrics and this machine's GPUs, read while a load runs
    results/      records -> metrics -> report; its files and page
    compare/      comparison of reports, including those of other tools (importers/)
    mock_server/  server with known token times; selftest.py measures the client against it

The package knows URLs, not engines or stores. Importing it loads none of its modules.
"""
