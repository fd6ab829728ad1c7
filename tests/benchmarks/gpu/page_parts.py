"""What every section of `make gpu-e2e`'s page has: title, machine, versions and commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def section_text(title: str, section: Mapping[str, Any], lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}\n", where(section), *lines, commands(section)])


def where(section: Mapping[str, Any]) -> str:
    machine, versions = section["machine"], section["versions"]
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    gpus = f"{machine['gpus']} x " if machine["gpus"] > 1 else ""
    beside = f" Meanwhile the host's other GPUs ran: {section['beside']}." if section.get("beside") else ""
    runs = section.get("runs", 1)
    parts = f" In {runs} runs of that day, each on a machine as this one." if runs > 1 else ""
    return (
        f"{section['date']}, {gpus}{machine['gpu']} (SM{machine['sm']}), driver {machine['driver']}, CUDA "
        f"{machine['cuda']}, {machine['cores']} cores; {named}. A copy within the GPU moves "
        f"{bandwidth(section):,.0f} GB/s. {section['seconds']:.0f} s.{beside}{parts}\n"
    )


def bandwidth(section: Mapping[str, Any]) -> float:
    return float(section["machine"]["bandwidth_gbs"])


def commands(section: Mapping[str, Any]) -> str:
    if not section["commands"]:
        return ""
    return "\n".join(["<details><summary>Commands</summary>\n", "```", *section["commands"], "```\n", "</details>\n"])
