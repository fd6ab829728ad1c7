"""trtpipe: from a Hugging Face model to a measured Triton deployment, in one command or from Python.

    spec = trtpipe.settings(model="smollm2-135m", gpu="cpu")
    built = trtpipe.build(spec)
    with trtpipe.serve(built.target) as client:
        client.chat("What is the capital of France?")
        report = trtpipe.bench(concurrency=4, requests=16)

docs/python.md describes each name of `__all__`, which are loaded when they are first used. Modules below are not part
of the API. pipeline/, engines/, triton_repo/ and configs/ here are links to the folders of that name at the root of the
repository; in an installed trtpipe they are folders.
"""

__version__ = "0.2.0"

# Nothing is imported here: this runs before launch.py has taken the current folder out of sys.path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from trtpipe.engines.errors import (
        ArtefactRefused,
        HostError,
        InputDataError,
        StageFailed,
        TrtpipeError,
        UsageError,
    )
    from trtpipe.pipeline.api.bench import bench
    from trtpipe.pipeline.api.bench_options import BenchArguments
    from trtpipe.pipeline.api.build import BuildOptions, Built, build, settings
    from trtpipe.pipeline.api.check import check
    from trtpipe.pipeline.api.migrate import migrate
    from trtpipe.pipeline.api.plan import plan
    from trtpipe.pipeline.api.prove import prove
    from trtpipe.pipeline.api.serve import Client, Sampling, serve
    from trtpipe.pipeline.api.tune import tune
    from trtpipe.pipeline.bench.results.report import BenchReport
    from trtpipe.pipeline.migration import Migration
    from trtpipe.pipeline.planner.advice import Advice
    from trtpipe.pipeline.prove.proof import Proof
    from trtpipe.pipeline.spec import BuildSpec
    from trtpipe.pipeline.tune.study import Study
    from trtpipe.triton_repo.check.faults import Fault

__all__ = [
    "Advice",
    "ArtefactRefused",
    "BenchArguments",
    "BenchReport",
    "BuildOptions",
    "BuildSpec",
    "Built",
    "Client",
    "Fault",
    "HostError",
    "InputDataError",
    "Migration",
    "Proof",
    "Sampling",
    "StageFailed",
    "Study",
    "TrtpipeError",
    "UsageError",
    "bench",
    "build",
    "check",
    "migrate",
    "plan",
    "prove",
    "serve",
    "settings",
    "tune",
]

_MODULES = {
    "engines.errors": (
        "ArtefactRefused", "HostError", "InputDataError", "StageFailed", "TrtpipeError", "UsageError",
    ),
    "pipeline.api.bench": ("bench",),
    "pipeline.api.bench_options": ("BenchArguments",),
    "pipeline.api.build": ("BuildOptions", "Built", "build", "settings"),
    "pipeline.api.check": ("check",),
    "pipeline.api.migrate": ("migrate",),
    "pipeline.api.plan": ("plan",),
    "pipeline.api.prove": ("prove",),
    "pipeline.api.serve": ("Client", "Sampling", "serve"),
    "pipeline.api.tune": ("tune",),
    "pipeline.bench.results.report": ("BenchReport",),
    "pipeline.migration": ("Migration",),
    "pipeline.planner.advice": ("Advice",),
    "pipeline.prove.proof": ("Proof",),
    "pipeline.spec": ("BuildSpec",),
    "pipeline.tune.study": ("Study",),
    "triton_repo.check.faults": ("Fault",),
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name):
        for module, names in _MODULES.items():
            if name in names:
                from importlib import import_module

                value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
                return value
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

    def __dir__():
        return sorted({*globals(), *__all__})
