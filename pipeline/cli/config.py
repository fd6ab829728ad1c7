"""The user's configuration file, and `trtpipe config`, which prints what it and the environment set."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.cli.options import Json

if TYPE_CHECKING:
    from trtpipe.pipeline.layers import Layer

EXAMPLE = 'runtime = "vllm"'
MAX_BYTES = 1 << 20
SHOWN = ("TRTPIPE_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "NO_COLOR")
SECRET = ("HF_TOKEN", "TRTPIPE_API_KEY", "TRTPIPE_API_KEYS")


@dataclass(frozen=True, kw_only=True)
class UserConfig:
    """Defaults of the user's own, which recipes and options outrank.

    runtime        runtime of targets for a GPU
    registry       URL that `push`, `pull` and `search` use
    engine_python  Python of the environment in which vLLM is installed
    prices         price of each GPU per hour, for `plan`
    """

    runtime: str | None = None
    registry: str | None = None
    engine_python: Path | None = None
    prices: dict[str, float] = field(default_factory=dict)

    @property
    def layer(self) -> Layer:
        """Its settings of a build, as the weakest layer."""
        return str(path()), {"runtime": self.runtime}

    def python_for(self, runtime: Callable[[], str]) -> str | None:
        """`engine_python` for a runtime with an environment of its own; None for another runtime, and without one.

        Raises HostError where it is no executable file, and what `runtime` raises, which is called where there is one.
        """
        from trtpipe.engines import load_backend
        from trtpipe.engines.errors import HostError

        if self.engine_python is None or load_backend(runtime()).NEEDS is None:
            return None
        if shutil.which(self.engine_python) is None:
            raise HostError(
                f"engine_python of {path()} is {self.engine_python}", why="it is not an executable file",
                remedy="write there the Python of vLLM's environment, or give --engine-python",
            )  # fmt: skip
        return str(self.engine_python)


def path() -> Path:
    """config.toml in the folder `trtpipe` of XDG_CONFIG_HOME, which counts if it is absolute, else of ~/.config."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (folder if folder.is_absolute() else Path("~/.config").expanduser()) / "trtpipe" / "config.toml"


def read_config() -> UserConfig:
    """The user's configuration; defaults where there is no file. Raises ConfigError."""
    from trtpipe.configs import facts, read
    from trtpipe.engines import BACKENDS
    from trtpipe.engines.errors import UsageError, suggestion
    from trtpipe.engines.json_input import read_bounded

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    where = path()
    try:
        text = read_bounded(where, MAX_BYTES)
    except FileNotFoundError:
        return UserConfig()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise read.ConfigError(f"{where} cannot be read", why=why) from None
    try:
        values = tomllib.loads(text.decode("utf-8"))
    except ValueError as error:
        raise read.ConfigError(
            f"{where} is not TOML", why=str(error), remedy=f"write lines such as {EXAMPLE}"
        ) from None
    config = read.build(UserConfig, values, str(where))
    if config.runtime is not None and config.runtime not in BACKENDS:
        known = suggestion(config.runtime, BACKENDS)
        raise read.ConfigError(f"{where}: unknown runtime '{config.runtime}'", remedy=known)
    try:
        prices = {facts.find_gpu(name).name: price for name, price in config.prices.items()}
    except UsageError as error:
        raise read.ConfigError(f"{where}: prices: {error.what}", remedy=error.remedy) from None
    for name, price in prices.items():
        if not 0 < price < 1e6:
            raise read.ConfigError(f"{where}: prices.{name} is {price}", remedy="give the price of one GPU an hour")
    python = None
    if config.engine_python is not None:
        python = Path(os.path.expanduser(config.engine_python))  # noqa: PTH111  # Path raises for a user that is not
    return UserConfig(runtime=config.runtime, registry=config.registry, engine_python=python, prices=prices)


def config(as_json: Json = False) -> None:
    """Print the user's configuration, and where each value is from.

    A file config.toml holds defaults of your own. Options and recipes come before it.

    \b
    Keys:
      runtime = "vllm"                              runtime of targets for a GPU
      registry = "s3://bucket/models"               of push, pull and search
      engine_python = "/opt/vllm/bin/python"        where vLLM is installed
      prices = {h100 = 2.5, a100 = 1.4}             of a GPU an hour, for plan

    \b
    Examples:
      trtpipe config
      trtpipe config --json
    """
    from trtpipe.configs.home import default_home
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving import engine_python

    found, where = read_config(), path()
    file = str(where)
    rows: list[tuple[str, Any, str]] = []
    for name in (one.name for one in fields(found) if one.name != "prices"):
        value = getattr(found, name)
        if name == "engine_python" and value is None and engine_python.beside() is not None:
            rows.append((name, engine_python.beside(), "the environment beside this one"))
        else:
            rows.append((name, value, "default" if value is None else file))
    rows += [(f"prices.{name}", price, file) for name, price in found.prices.items()]
    rows += [(name, os.environ[name], "environment") for name in SHOWN if name in os.environ]
    rows += [(name, "set, not shown", "environment") for name in SECRET if name in os.environ]
    if "TRTPIPE_HOME" not in os.environ:
        rows.append(("TRTPIPE_HOME", default_home(), "default"))
    columns = ("setting", "value", "from")
    if as_json:
        values = [dict(zip(columns, row, strict=True)) for row in rows]
        console.result_json({"path": where, "exists": where.is_file(), "values": values})
        return
    console.result(f"{where}{'' if where.is_file() else ': no such file; `trtpipe config --help` says what goes in'}")
    console.table(columns, rows)
