"""Renderer of self-contained HTML pages, without network or script, from templates."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )


def render(template: str, **values: object) -> str:
    """Text of a page, ending in one newline; a value that the template needs and does not get is an error."""
    return _environment().get_template(template).render(values).strip() + "\n"
