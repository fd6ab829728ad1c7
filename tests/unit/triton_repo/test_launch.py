"""The server's command: one process, or one for each rank."""

from __future__ import annotations

from dataclasses import replace

from trtpipe.triton_repo.launch import ServerOptions, server_command

OPTIONS = ServerOptions(
    repository="/models", models=["ensemble", "tensorrt_llm"], host="127.0.0.1", http=8000, grpc=8001, metrics=8002
)
PORTS = [
    "--http-address=127.0.0.1", "--http-port=8000", "--grpc-address=127.0.0.1", "--grpc-port=8001",
    "--metrics-address=127.0.0.1", "--metrics-port=8002",
]  # fmt: skip
REGION = "--backend-config=python,shm-region-prefix-name=trtpipe8000_"
REST = ["--disable-auto-complete-config", "--exit-timeout-secs=30"]


def test_one_process() -> None:
    assert server_command(OPTIONS) == [
        "tritonserver", "--model-repository=/models", "--model-control-mode=explicit", "--load-model=ensemble",
        "--load-model=tensorrt_llm", *PORTS, f"{REGION}0_", *REST,
    ]  # fmt: skip


def test_a_process_for_each_rank() -> None:
    common = ["-n", "1", "tritonserver", "--model-repository=/models", "--model-control-mode=explicit"]
    silent = ["--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"]
    assert server_command(OPTIONS, world_size=3) == [
        "mpirun", "--bind-to", "none", "--mca", "odls_base_sigkill_timeout", "30",
        *common, "--load-model=ensemble", "--load-model=tensorrt_llm", *PORTS, f"{REGION}0_", *REST, ":",
        *common, "--load-model=tensorrt_llm", *PORTS, f"{REGION}1_", *REST, *silent, ":",
        *common, "--load-model=tensorrt_llm", *PORTS, f"{REGION}2_", *REST, *silent,
    ]  # fmt: skip
    assert "--allow-run-as-root" in server_command(replace(OPTIONS, root=True), world_size=2)


def test_the_time_to_the_first_response_is_published_by_the_rank_that_answers() -> None:
    words = server_command(replace(OPTIONS, histograms=True), world_size=2)
    assert [word for word in words if "metrics-config" in word] == ["--metrics-config=histogram_latencies=true"]
    assert words.index("--metrics-config=histogram_latencies=true") < words.index(":")


def test_the_first_rank_alone_sends_spans_and_only_of_requests_that_bring_a_trace() -> None:
    words = server_command(replace(OPTIONS, traces_url="http://collector:4318/v1/traces"), world_size=2)
    assert [word for word in words if word.startswith("--trace")] == [
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=0",
        "--trace-config=opentelemetry,url=http://collector:4318/v1/traces",
        "--trace-config=opentelemetry,resource=service.name=triton",
    ]
