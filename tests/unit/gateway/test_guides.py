"""Structured output: guides that requests ask for, and schemas that guided decoding cannot enforce."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import (
    CHAT,
    OWN_INPUTS,
    TEXT,
    Asked,
    Triton,
    ask,
    chat,
    events,
    response,
    saying,
)
from trtpipe.pipeline.gateway.failure import Failure
from trtpipe.pipeline.gateway.schemas import checked

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def text(asked: Asked, name: str) -> str:
    """A text input: its length, then its bytes."""
    return bytes(asked.raw[name][4:]).decode()


@pytest.mark.process
@pytest.mark.loopback
def test_every_way_to_ask_reaches_the_engine_as_a_guide(folder: Path) -> None:
    def by_schema(schema: Any) -> dict[str, Any]:
        return {
            "type": "json_schema",
            "json_schema": {"name": "x", "description": "y", "strict": True, "schema": schema},
        }

    anything = '{"type":"object","additionalProperties":true}'
    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": {"type": "json_object"}}, "json_schema", anything),
        ({"response_format": by_schema(PERSON)}, "json_schema", json.dumps(PERSON, separators=(",", ":"))),
        ({"structured_outputs": {"json": {"const": 1}}}, "json_schema", '{"const":1}'),
        ({"structured_outputs": {"json": '{"const": "\u00e9"}', "regex": None}}, "json_schema", '{"const":"\\u00e9"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", anything),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        (
            {"structured_outputs": {"choice": ["yes", '"no"\n', "yes"]}},
            "ebnf_grammar",
            'root ::= "yes" | "\\"no\\"\\n"',
        ),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "ebnf_grammar", 'root ::= "x"'),
        ({"structured_outputs": {"structural_tag": tag}}, "structural_tag", tag),
    ]

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        triton.inputs = [*triton.inputs, *OWN_INPUTS]
        for fields, kind, guide in cases:
            assert (await client.post(CHAT, json=chat(**fields))).status_code == 200, fields
            assert await events(client, TEXT, {"model": "llama", "prompt": "x", **fields})
            for asked in triton.asked[-2:]:
                assert text(asked, "guided_decoding_guide_type") == kind
                assert text(asked, "guided_decoding_guide") == guide
                assert asked.shapes["guided_decoding_guide"] == [1, 1]
        assert (await client.post(CHAT, json=chat(response_format={"type": "text"}))).status_code == 200
        assert "guided_decoding_guide" not in triton.asked[-1].raw

    ask(saying(folder, "x"), folder, scenario)


@pytest.mark.process
@pytest.mark.loopback
def test_what_is_no_form_is_refused_by_its_place(folder: Path) -> None:
    def by_schema(**given: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **given}}}

    at = "response_format.json_schema"
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": {"type": "xml"}}, "response_format.type", "should be 'text'"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "unknown field"),
        ({"response_format": {"type": "json_schema"}}, at, "should be an object"),
        (by_schema(), f"{at}.schema", "missing"),
        (by_schema(schema=True), f"{at}.schema", "should be an object"),
        (by_schema(schema=PERSON, strict="yes"), f"{at}.strict", "boolean"),
        (by_schema(schema=PERSON, strikt=True), f"{at}.strikt", "unknown field"),
        (by_schema(schema={"type": "object", "properties": {"a": {"not": {}}}}), f"{at}.schema.properties.a.not",
         "guided decoding cannot enforce this keyword"),
        (by_schema(schema={"description": "x" * 40_000}), f"{at}.schema", "bytes"),
        ({"structured_outputs": {"json": {"maxItems": 1001}}}, "structured_outputs.json.maxItems", "at most 1000"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "a string"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of strings"),
        ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark", "unknown"),
        ({"structured_outputs": {"grammar": "x" * 40_000}}, "structured_outputs.grammar", "bytes"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "takes one of"),
        ({"structured_outputs": {"regex": "a"}, **by_schema(schema=PERSON)}, "structured_outputs", "response_format"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "C++ backend"),
    ]  # fmt: skip

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for fields, param, telling in cases:
            answer = await client.post(CHAT, json=chat(**fields))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert telling in error["message"]
            assert param in error["message"]
        assert triton.asked == []
        triton.inputs = ["input_ids"]

    ask(saying(folder, "x"), folder, scenario)


@pytest.mark.process
@pytest.mark.loopback
def test_a_form_that_the_engine_refuses_names_the_field_and_a_runtime_without_forms_refuses_all(folder: Path) -> None:
    async def refusing(asked: Asked, context: Any) -> AsyncIterator[Any]:
        out = response([], final=True)
        out.error_message = "guided_decoding_guide: this JSON schema cannot be used: it is a bomb"
        yield out

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for stream in (False, True):
            answer = await client.post(CHAT, json=chat(stream=stream, structured_outputs={"json": PERSON}))
            assert answer.status_code == 400
            assert answer.json()["error"] == {
                "message": "'structured_outputs.json': this JSON schema cannot be used: it is a bomb",
                "type": "invalid_request_error",
                "param": "structured_outputs.json",
                "code": "invalid_schema",
            }

    async def without(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=chat(response_format={"type": "json_object"}))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")

    ask(refusing, folder, scenario)
    ask(saying(folder, "x"), folder, without, triton={"inputs": ["input_ids"]})


@pytest.mark.parametrize(
    ("schema", "place", "telling"),
    [
        ({"type": "fruit"}, "s.type", "should be of object"),
        ({"type": []}, "s.type", "should be of object"),
        ({"$ref": "http://x/y"}, "s.$ref", "names no schema"),
        ({"$ref": "#/$defs/x"}, "s.$ref", "names no schema"),
        ({"$ref": "#/x", "x": {"not": {}}}, "s.$ref", "names no schema"),
        ({"$ref": "#/$defs", "$defs": {"not": {}}}, "s.$ref", "names no schema"),
        ({"$ref": "#"}, "s.$ref", "refers to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "s.properties.a.$ref", "without end"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"minItems": 1, "items": {"anyOf": [
            {"$ref": "#/$defs/b"}, {"minProperties": 1, "additionalProperties": {"$ref": "#/$defs/b"}}]}}}},
         "s.$defs.b.items.anyOf.0.$ref", "without end"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
         "s.$defs.a.anyOf.0", "refers to itself"),
        ({"$defs": {"a": {}}, "$ref": "#/$defs/a", "minimum": 3}, "s.minimum", "beside '$ref'"),
        ({"allOf": [{}, {}]}, "s.allOf", "several schemas at once"),
        ({"anyOf": [{}], "type": "string"}, "s.type", "beside 'anyOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "s.oneOf", "a value may match two"),
        ({"properties": {"x": {"oneOf": [{"$ref": "#/properties/y"}, {"$ref": "#/properties/z"}]},
                         "y": {"type": "object", "properties": 5}, "z": {"type": "object", "properties": {}}}},
         "s.properties.y.properties", "should be an object"),
        ({"properties": {"x": {"oneOf": [{"$ref": "#/properties/y"}, {"$ref": "#/properties/z"}]},
                         "y": {"properties": {"a": {"const": "b"}}, "required": 5, "type": "object"},
                         "z": {"properties": {"a": {"const": "c"}}, "required": ["a"], "type": "object"}}},
         "s.properties.y.required", "a list of names"),
        ({"enum": [1, "a"], "type": "integer"}, "s.enum", "not all of the type"),
        ({"enum": [1], "minimum": 0}, "s.minimum", "beside 'enum'"),
        ({"type": "string", "minimum": 0}, "s.minimum", "which the type does not allow"),
        ({"minimum": 0, "maxLength": 1}, "s.type", "is missing"),
        ({"type": "string", "pattern": "a", "maxLength": 1}, "s.maxLength", "beside 'pattern'"),
        ({"type": "number", "multipleOf": 0.5}, "s.multipleOf", "a whole number up to 1000"),
        ({"type": "integer", "multipleOf": 2, "minimum": 1}, "s.multipleOf", "beside another bound"),
        ({"type": "object", "required": ["a"]}, "s.required", "not in properties"),
        ({"type": "array", "items": [{}]}, "s.items", "which is an object"),
        ({"type": "array", "uniqueItems": True}, "s.uniqueItems", "cannot enforce this keyword"),
        ({"type": "array", "maxItems": -1}, "s.maxItems", "0 or more"),
    ],
)  # fmt: skip
def test_schemas_that_guided_decoding_cannot_enforce(schema: Any, place: str, telling: str) -> None:
    with pytest.raises(Failure) as refused:
        checked(schema, "s")
    assert telling in refused.value.message
    assert (refused.value.param or "").startswith(place)


@pytest.mark.parametrize(
    ("schema", "enforced"),
    [
        # What pydantic writes for AnyUrl.
        ({"format": "uri", "minLength": 1, "type": "string"},
         {"type": "string", "pattern": '^[^"\\\\\\x00-\\x1f]{1,}$'}),
        ({"format": "uri", "pattern": "^a", "type": "string"}, {"type": "string", "pattern": "^a"}),
        ({"format": "date", "minLength": 0, "type": "string"}, {"type": "string", "format": "date"}),
        ({"minLength": 0, "pattern": "^a"}, {"type": "string", "pattern": "^a"}),
        ({"type": "object", "minProperties": 0}, {"type": "object", "additionalProperties": True}),
        ({**PERSON, "minProperties": 0}, PERSON),
        ({"type": "array", "minItems": 0}, {"type": "array", "items": True}),
    ],
)  # fmt: skip
def test_what_restricts_nothing_is_left_out(schema: Any, enforced: Any) -> None:
    assert json.loads(checked(schema, "s")) == enforced


def test_schemas_that_refer_to_themselves_and_have_values_that_end() -> None:
    chain = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
    tree = {"type": "array", "items": {"$ref": "#"}}
    either = {
        "$defs": {
            "a": {"type": ["object", "string"], "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"minItems": 2, "items": {"$ref": "#/$defs/a"}},
        },
        "$ref": "#/$defs/b",
    }
    optional = {"properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}}, "required": ["value"]}
    for schema in (chain, tree, either, optional):
        assert checked(schema, "s")


def test_a_schema_that_is_a_bomb_ends_by_itself() -> None:
    """Each definition names the next one twice: 2 ** 60 ways, and sixty definitions."""
    defs: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    assert checked({"$defs": {**defs, "d60": {"type": "null"}}, "$ref": "#/$defs/d0"}, "s")
