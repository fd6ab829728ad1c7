"""Start of every Python process of trtpipe, the `trtpipe` command included.

    python launch.py [--parent PID] MODULE [ARGUMENT ..]     run MODULE as `python -m MODULE` does

With --parent the process gets SIGTERM when process PID, which started it, ends in any way, a kill included; SIGKILL
where that process ignores SIGTERM, which those that it starts ignore as well.

`python -m` looks for modules in the current folder first, and so does a relative or an empty entry of PYTHONPATH: a
user's folder named `trtpipe`, or a file `json.py`, would run in place of ours. Python 3.11 has `-P` against the
first, 3.10 has nothing. A process that starts here finds the package that this file is in, and looks for nothing in
the current folder. Its Python may be of another environment, where trtpipe is not installed.

With PYTHONPATH=. Python itself imports `sitecustomize`, on 3.10 more, and a package named `trtpipe`, from the current
folder before the first line here; child processes are started without that entry.
"""

# Python has loaded both before any program starts. Another import, of __future__ too, would be looked up.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Variables that list folders. A relative entry of one means whatever folder the command is run in.
LISTS = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH")
# How often a thread of OpenMP, torch's on a CPU, looks for work before it sleeps. libgomp's default of 300,000 keeps
# the cores busy that a server, the gateway, `bench` or another engine on this machine could use: of two engines on the
# same two cores each then serves a third of what it serves with 1,000, which libgomp itself takes where it knows that
# threads are more than cores. An engine that has the machine to itself loses about a tenth.
SPINS = "1000"


def main() -> None:
    """The `trtpipe` command."""
    isolate()
    try:
        from trtpipe.pipeline.cli.app import main as command

        command()
    except KeyboardInterrupt:  # while modules are imported: later the command handles it
        os.write(2, b"interrupted\n")
        sys.exit(130)


def isolate() -> None:
    """Find the package that this file is in, and nothing in the current folder: here and in child processes."""
    entries = os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    stated = {entry for entry in entries if os.path.isabs(entry)}
    relative = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)} - stated
    sys.path[:] = [entry for entry in sys.path if entry and entry not in relative]
    for name in LISTS:
        if name in os.environ:
            kept = [entry for entry in os.environ[name].split(os.pathsep) if os.path.isabs(entry)]
            os.environ[name] = os.pathsep.join(kept)
    # For what child processes start in turn, such as multiprocessing's `python -c`. Python 3.10 does not know it.
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.meta_path.insert(0, _OwnPackage())


def end_with(parent: int) -> None:
    """Have the kernel end this process when `parent` ends: more exactly, when the thread that started it ends. The
    signal is SIGTERM, or SIGKILL where that is ignored.

    So a thread that starts a process outlives it. Only Linux can do this.
    """
    import signal

    number = signal.SIGKILL if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN else signal.SIGTERM
    _at_parents_end(number)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), number)


def outlive_parent() -> None:
    """Take `end_with` back."""
    _at_parents_end(0)


def _at_parents_end(number: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


class _OwnPackage:
    """Finds the package that this file is in, and leaves every other module to sys.path.

    Its parent folder may be a site-packages, even of another Python's: nothing else in it is looked at.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "trtpipe":
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [FOLDER])


# multiprocessing runs this file again, under the second name, in each process that it spawns.
if __name__ in ("__main__", "__mp_main__"):
    if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # this file's folder
    isolate()

if __name__ == "__main__":
    import runpy

    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    del sys.argv[0]
    if sys.argv[0] == "--parent":
        end_with(int(sys.argv[1]))
        del sys.argv[:2]
    # This file stays sys.modules["__main__"], for multiprocessing: a spawned process could not find MODULE by its name.
    runpy.run_module(sys.argv[0], run_name="__main__")
