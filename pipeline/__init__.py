"""The pipeline: staged builds, serving, the gateway, benchmarks, deployment and the command line."""
