"""Mutations of files by their format: what an attacker writes, and what bad disks and broken transfers leave.

`mutate` changes the bytes of a file in a way that its name suggests; `PLACES` are what can stand in place of a file.
Everything is chosen by the generator that is passed in: the same generator gives the same mutation.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Mutation = Callable[[random.Random, bytes], bytes]

# Values that json.dumps cannot write, by the string that stands for them.
RAW = {
    "@digits": "9" * 20_000,
    "@deep": "[" * 300 + "]" * 300,
    "@exponent": "1e999999",
    "@fraction": "0." + "1" * 20_000,
    "@infinity": "-Infinity",
}
NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 1.5, 2**31, 2**53, 2**63, 2**64, 10**63, 10**400, -(2**70), 1e308, float("nan"),
    float("inf"), "", " ", "BF16", "F8_E5M2", "x" * 5000, "x" * 300_000, "../x", "../../../../x", "/nowhere/x", ".",
    "..", "a/../../x", "a\0b", "a\nerror: b", "\x1b[31m", "\ud800", "\udcff", "\u202e", "\U0001f600", "${x}",
    "{{ 7 * 7 }}", "%s%n", "nan", "1e400", [], {}, [[]], [1, 2], [2**62, 2**62], [True, False], {"a": {}}, {"": ""},
    {"rope_theta": "x"}, [None] * 1000, *RAW,
)  # fmt: skip
BITS = 8


def nasty(rng: random.Random) -> Any:
    """One of NASTY, which whoever gets it may change."""
    return copy.deepcopy(rng.choice(NASTY))


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    """Other bytes for a file of that name: by its format most of the time, else as bytes."""
    suffix = Path(name).suffix
    mutation = MUTATIONS.get(suffix, mutate_bytes) if rng.random() < 0.75 else mutate_bytes
    return mutation(rng, data)


# Bytes


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(9)
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 8, 100, 4096)))
    if kind == 0:
        return data[:at]
    if kind == 1 and data:
        return flip_bit(rng, data)
    if kind == 2:
        return data[:at] + rng.randbytes(rng.choice((1, 8, 512))) + data[at:]
    if kind == 3:
        return data[:at] + data[end:]
    if kind == 4:
        return data[:at] + data[at:end] * rng.choice((2, 50)) + data[end:]
    if kind == 5:
        return data[:at] + b"\0" * (end - at) + data[end:]
    if kind == 6:
        return rng.choice((b"", b"\0", b"\xef\xbb\xbf" + data, b"\xff\xfe" + data, data[::-1], b"\n" * 100_000, b" "))
    if kind == 7:
        return data + rng.choice((b"\0", b"x", b"\n", data[:512]))
    return rng.randbytes(rng.choice((1, 100, 10_000)))


def flip_bit(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(BITS))]) + data[at + 1 :]


# JSON and YAML


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    out: list[tuple[Any, Any]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        out.append((value, key))
        out += places(inner)
    return out


def mutate_value(rng: random.Random, value: Any) -> Any:
    """A JSON value with one change somewhere inside, made in place; or another value."""
    spots = places(value)
    if not spots or rng.random() < 0.05:
        return nasty(rng)
    container, key = rng.choice(spots)
    kind = rng.randrange(6)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[rng.choice(("", "x", "../x", "a\0", str(key) + "x", "x" * 5000))] = container.pop(key)
    elif kind == 2:
        other, name = rng.choice(spots)
        container[key] = copy.deepcopy(other[name])  # what holds itself is not JSON
    elif kind == 3 and isinstance(container[key], (list, dict)) and container[key]:
        container[key] = list(container[key]) * rng.choice((2, 1000))
    elif kind == 4 and isinstance(container[key], (int, float)):
        container[key] = rng.choice((-container[key], container[key] + 1, container[key] * 10**9, str(container[key])))
    else:
        container[key] = nasty(rng)
    return value


def _dumps(value: Any, indent: int | None = None) -> bytes:
    text = json.dumps(value, indent=indent)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(10)
    if kind == 0:
        return mutate_bytes(rng, data)
    if kind == 1:
        opening, closing = rng.choice(((b'{"a":', b"}"), (b"[", b"]")))
        depth = rng.choice((40, 70, 1000, 50_000))
        return opening * depth + (data if rng.random() < 0.5 else b"1") + closing * depth
    try:
        value = json.loads(data)
    except ValueError:
        return mutate_bytes(rng, data)
    if kind == 2 and isinstance(value, dict) and value:  # an entry twice: a dictionary cannot hold it
        name = json.dumps(rng.choice(list(value))).encode()
        return data.rstrip()[:-1] + b"," + name + b":" + _dumps(nasty(rng)) + b"}"
    for _ in range(rng.choice((1, 1, 1, 3))):
        value = mutate_value(rng, value)
    return _dumps(value, rng.choice((None, 2)))


def mutate_lines(rng: random.Random, data: bytes) -> bytes:
    """JSONL: one line is mutated, or the lines are."""
    lines = data.splitlines()
    kind = rng.randrange(5)
    if kind == 0 or not lines:
        return mutate_bytes(rng, data)
    at = rng.randrange(len(lines))
    if kind == 1:
        return b"".join(lines)
    if kind == 2:
        lines[at:at] = [rng.choice((b"", b"null", b"[]", b"{}", b"\0", b"[" * 10_000, b'"\\ud800"'))] * 3
    else:
        lines[at] = mutate_json(rng, lines[at]).replace(b"\n", b" ")
    return b"\n".join(lines) + b"\n"


_YAML_VALUES = (
    "&a [*a]", "&a {<<: *a}", "*nobody", "!!int ''", "!!bool x", "!!timestamp x", "!!binary '@'", "!!set {a, b}",
    "!!python/object/apply:os.system ['true']", "2001-99-99", "2001-01-01", "1" + ":1" * 2000, "1:1.5", "0x_", "0o9",
    "9" * 20_000, ".nan", "-.inf", "1e400", "~", "''", '"\\0"', '"\\uD800"', "[" * 500, "{a: " * 500, "'unfinished",
    "? [a]\n: b", "|\n  x\n y", "<<", "{<<: [1]}", "on", "0777", "- - - x", "@x", "%x", "a: b: c", "\t", "# x", "...",
    "---",
)  # fmt: skip
_BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


def mutate_yaml(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return mutate_bytes(rng, data)
    text = data.decode(errors="replace")
    lines = text.splitlines()
    if kind == 1 and lines:  # the value of one line
        at = rng.randrange(len(lines))
        head, colon, _ = lines[at].partition(":")
        lines[at] = head + (colon or ":") + " " + rng.choice(_YAML_VALUES)
        return "\n".join(lines).encode() + b"\n"
    if kind == 2 and lines:  # a line more, less, or elsewhere
        at = rng.randrange(len(lines))
        line = rng.choice((*lines, "unknown: 1", "  x: 1", "\tx: 1", "- x", *_YAML_VALUES))
        lines[at : at + rng.randrange(2)] = [line]
        return "\n".join(lines).encode() + b"\n"
    if kind == 3:
        return rng.choice(
            (_BOMB + text, text + _BOMB, "[" * 10_000, "{a: " * 5000, "- " * 5000, "a: &x " * 99)
        ).encode()
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return mutate_bytes(rng, data)
    value = mutate_value(rng, json.loads(json.dumps(value, default=str)))
    return _dumps(value) if rng.random() < 0.5 else yaml.safe_dump(_without_surrogates(value)).encode()


def _without_surrogates(value: Any) -> Any:
    """libyaml cannot write half of a pair."""
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(inner) for inner in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


# Protobuf text


_PBTXT = (
    "", "{", "}", "[", "]", '"', "'x", ":", "name: \"x\"", "name: 'a\\0b'", "max_batch_size: -1",
    "max_batch_size: 99999999999", f"max_batch_size: {'9' * 20_000}", "input { " * 2000,
    "dims: [ -1, 0, 9223372036854775807 ]", 'backend: "x"',
    'platform: "ensemble"', "instance_group [ { count: 1000000000 } ]", "ensemble_scheduling { step [ { } ] }",
    'parameters { key: "gpt_model_path" value: { string_value: "../../x" } }', "optimization { }", "\ufeff", "${x}",
    'parameters { key: "tokenizer_dir" value: { string_value: "/dev/zero" } }', "name: \"" + "\\\\" * 5000 + '"',
    "version_policy: { specific: { versions: [ -1, 0, 9223372036854775807 ] } }", "data_type: TYPE_INVALID", "#" * 5000,
    'model_warmup [ { name: "x" batch_size: 4294967295 } ]', "1e999", "name: \"\\xff\\377\"", "unknown_field: 1",
)  # fmt: skip


def mutate_pbtxt(rng: random.Random, data: bytes) -> bytes:
    lines = data.decode(errors="replace").splitlines()
    kind = rng.randrange(5)
    if kind == 0 or not lines:
        return mutate_bytes(rng, data)
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    if kind == 1:
        del lines[at : at + rng.choice((1, 1, 5))]
    elif kind == 2:
        lines[at:at] = [rng.choice(_PBTXT)]
    elif kind == 3:
        lines[at], lines[other] = lines[other], lines[at]
    else:  # one word of a line
        words = lines[at].split(" ")
        spot = rng.randrange(len(words))
        words[spot] = rng.choice(
            ("-1", "0", "99999999999", '""', '"../x"', '"a\\000b"', "TYPE_FP64", "true", "x", "1e400")
        )
        lines[at] = " ".join(words)
    return "\n".join(lines).encode() + b"\n"


# Safetensors


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(5)
    if kind == 0 or len(data) < BITS:
        return mutate_bytes(rng, data)
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    if kind == 1:
        lengths = (0, 1, length - 1, length + 1, len(data), 2**31, 2**40, 2**63, 2**64 - 1)
        return struct.pack("<Q", rng.choice(lengths)) + data[8:]
    if kind == 2:
        return data[: 8 + length] + mutate_bytes(rng, body)
    changed = mutate_json(rng, header.rstrip())
    if kind == 3:
        changed = changed.ljust(length)
    return struct.pack("<Q", len(changed)) + changed + body


# Tar


def mutate_tar(rng: random.Random, data: bytes) -> bytes:
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = [(member, _content(tar, member)) for member in tar]
    except tarfile.TarError:
        return mutate_bytes(rng, data)
    kind = rng.randrange(10)
    if kind == 0 or not members:
        return mutate_bytes(rng, data)
    at = rng.randrange(len(members))
    member, content = members[at]
    if kind == 1:
        names = ("../x", "/nowhere/x", "", ".", "a/../../x", "x" * 5000, "a\nb", "\udcff", members[0][0].name)
        member.name = rng.choice(names)
    elif kind == 2:
        kinds = (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.FIFOTYPE,
            tarfile.DIRTYPE,
            tarfile.CHRTYPE,
            tarfile.GNUTYPE_SPARSE,
        )
        member.type = rng.choice(kinds)
        member.linkname = rng.choice(("../x", "/nowhere/x", member.name, members[0][0].name, ""))
        content = b"" if rng.random() < 0.5 else content
        member.size = len(content)
    elif kind == 3:
        del members[at]
        return _packed(members)
    elif kind == 4:
        members.insert(rng.randrange(len(members) + 1), members[at])
        return _packed(members)
    elif kind == 5:
        rng.shuffle(members)
        return _packed(members)
    elif kind == 6:
        sizes = ("0", str(len(content) // 2), str(len(content) * 2), str(2**40), "-1", "x", "1" * 300)
        member.pax_headers = {rng.choice(("size", "GNU.sparse.size", "GNU.sparse.realsize", "path")): rng.choice(sizes)}
    elif kind == 7:
        return _resized(rng, data, members)
    else:  # the index, more often than not
        at = 0 if rng.random() < 0.7 else at
        member, content = members[at]
        content = mutate(rng, member.name, content)
        member.size = len(content)
    members[at] = (member, content)
    return _packed(members)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    return stream.read() if stream else b""


def _packed(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    for member, content in members:
        try:
            header = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        except ValueError:
            continue  # tarfile does not write it
        out.write(header + content + b"\0" * (-len(content) % tarfile.BLOCKSIZE))
    return out.getvalue() + b"\0" * (2 * tarfile.BLOCKSIZE)


def _resized(rng: random.Random, data: bytes, members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Another size in a member's header, with a checksum that is right; what follows stays where it is."""
    member, _ = rng.choice(members)
    header = bytearray(data[member.offset : member.offset + tarfile.BLOCKSIZE])
    size = rng.choice((0, 1, member.size + 1, member.size - 1, member.size * 2, 8**11 - 1, 2**62))
    header[124:136] = b"%011o\0" % size if 0 <= size < 8**11 else b"\x80" + (size % 2**64).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    return data[: member.offset] + bytes(header) + data[member.offset + tarfile.BLOCKSIZE :]


MUTATIONS: dict[str, Mutation] = {
    ".json": mutate_json, ".jsonl": mutate_lines, ".yaml": mutate_yaml, ".pbtxt": mutate_pbtxt, ".tar": mutate_tar,
    ".safetensors": mutate_safetensors, ".engine": mutate_safetensors,
}  # fmt: skip


# What can stand in place of a file


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _folder(path: Path) -> None:
    path.mkdir()


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "x").touch()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 28)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target.format(name=path.name))


PLACES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "folder": _folder,
    "full folder": _full_folder,
    "fifo": _fifo,
    "unreadable": _unreadable,
    "huge": _huge,
    "loop": _link("{name}"),
    "to nothing": _link("nobody"),
    "to its folder": _link("."),
    "endless": _link("/dev/zero"),
}


def replace(path: Path, place: str) -> None:
    """Put what PLACES has under that name where the file `path` was."""
    _remove(path)
    PLACES[place](path)
