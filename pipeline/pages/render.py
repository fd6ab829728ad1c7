"""Renderer of self-contained HTML pages. A page asks the network for nothing, and all of it can be read
without script; its two scripts, allowed by their hashes, add tooltips and zoom to the charts."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from trtpipe.pipeline.pages.parts import Page

_HERE = Path(__file__).parent
# uPlot 1.6.32 as npm delivers it (NOTICE), and what draws our charts with it.
_SCRIPTS = (_HERE / "uplot" / "uPlot.iife.min.js", _HERE / "charts.js")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([_HERE / "templates", _HERE / "uplot"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    scripts = [file.read_text(encoding="utf-8") for file in _SCRIPTS]
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    environment.globals |= {
        "scripts": [Markup(text) for text in scripts],
        "policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
        + " ".join(f"'sha256-{one}'" for one in hashes),
    }
    return environment


def render(page: Page) -> str:
    """Text of a page, ending in one newline."""
    return _environment().get_template("page.html.j2").render(page=page).strip() + "\n"
