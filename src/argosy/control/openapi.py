"""The OpenAPI 3.1 document of the HTTP API, generated from the table of endpoints and the Structs of its bodies and answers.

Called once by http.py for `GET /v1/openapi.json`; a test holds the running API against it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.control.api import Problem

_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request could not be read.",
    "401": "The token is missing or wrong (loopback TCP only).",
    "403": "Host or Origin is not this server's.",
    "404": "There is no such thing.",
    "410": "The run has ended so long ago that only its directory is left.",
    "405": "The path knows other methods.",
    "409": "Not now.",
    "413": "The body is too large.",
    "422": "The request was understood and refused.",
    "503": "A part of the cluster is not there.",
    "507": "The home cannot be used: its disk is full, or its event log cannot be read.",
}


_SECURITY = {
    "token": {"type": "http", "scheme": "bearer"},
    "stream_token": {
        "type": "apiKey",
        "in": "query",
        "name": "token",
        "description": "Only with `Accept: text/event-stream`: an EventSource can send no header.",
    },
}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path, as data."""

    method: str
    path: str
    name: str
    """Name of the function that answers."""
    summary: str
    answer: Any
    """Type of the answer; None: any object."""
    status: int = 200
    query: Any = None
    body: Any = None
    streams: bool = False
    """May answer with server-sent events."""


def describe(endpoints: list[Endpoint], version: str) -> dict[str, Any]:
    """The whole document."""
    types = {Problem}
    for endpoint in endpoints:
        types |= {kind for kind in (endpoint.answer, endpoint.body) if kind is not None}
    ordered = sorted(types, key=lambda kind: str(kind.__name__))
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(
            endpoint, schema_of
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Argosy controller", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": _SECURITY,
        },
        "security": [{"token": []}],
    }


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    answer = {"type": "object"} if endpoint.answer is None else schema_of[endpoint.answer]
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    problem = {"application/json": {"schema": schema_of[Problem]}}
    responses: dict[str, Any] = {
        str(endpoint.status): {"description": endpoint.summary, "content": content}
    }
    for status, description in _ERRORS.items():
        responses.setdefault(status, {"description": description, "content": problem})
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": _path_parameters(endpoint.path) + _query_parameters(endpoint.query),
        "responses": responses,
    }
    if endpoint.streams:
        operation["security"] = [{"token": []}, {"stream_token": []}]
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[endpoint.body]}},
        }
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]


def _query_parameters(query: Any) -> list[dict[str, Any]]:
    if query is None:
        return []
    parameters = []
    for field in msgspec.structs.fields(query):
        schema = msgspec.json.schema(field.type)
        if "anyOf" in schema:
            # An absent parameter is how a query says null.
            (schema,) = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
        if field.default not in (msgspec.NODEFAULT, None):
            schema = {**schema, "default": field.default}
        parameters.append({"name": field.name, "in": "query", "schema": schema})
    return parameters
