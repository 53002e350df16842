"""The running API against its own OpenAPI document: whatever the document allows or forbids is tried."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from argosy import __version__
from argosy.control.home import open_cluster
from argosy.control.http import ENDPOINTS
from argosy.control.openapi import describe

pytestmark = pytest.mark.multiprocess
schema = schemathesis.openapi.from_dict(describe(ENDPOINTS, __version__))


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """A controller without an agent: submissions are checked and then refused, so nothing is ever started."""
    home = tmp_path_factory.mktemp("api") / "home"
    paths = open_cluster({"ARGOSY_HOME": str(home)})
    control = socket.socket(socket.AF_UNIX)
    control.bind(paths.control_socket)
    control.listen(8)
    tcp = socket.create_server(("127.0.0.1", 0))
    numbers = [control.fileno(), tcp.fileno()]
    place = ["--directory", paths.directory, "--runtime", paths.runtime]
    doors = ["--control-fd", str(numbers[0]), "--http-tcp-fd", str(numbers[1])]
    patience = ["--agent-wait-seconds", "0.01"]
    process = subprocess.Popen(
        [sys.executable, "-m", "argosy.control.controller", *place, *doors, *patience],
        pass_fds=numbers,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not os.path.exists(paths.http_json):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    port = json.loads(Path(paths.http_json).read_text())["port"]
    token = Path(paths.token).read_text().strip()
    yield f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"}
    process.terminate()
    errors = process.communicate(timeout=60)[1].decode()
    control.close()
    tcp.close()
    shutil.rmtree(paths.runtime)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors, errors


def test_the_document_is_served(api):
    base, headers = api
    request = urllib.request.Request(f"{base}/v1/openapi.json", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.loads(answer.read()) == schema.raw_schema


def whole_numbers(value):
    """2.0 is an integer to JSON Schema, and no client writes it that way."""
    if isinstance(value, dict):
        return {key: whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_documented(case, api):
    if case.query and case.query.get("follow") in (1, "1", True):
        # An endless stream is no answer to check; streams have tests of their own.
        case.query["follow"] = 0
    if isinstance(case.body, dict):
        case.body = whole_numbers(case.body)
    base, headers = api
    # A spec may fit the document and still contradict itself: its checks are tested with config/checks.py.
    is_submission = (case.method, case.path) == ("POST", "/v1/runs")
    excluded = [positive_data_acceptance] if is_submission else []
    case.call_and_validate(base_url=base, headers=headers, timeout=30, excluded_checks=excluded)


def documented_operations():
    """Every method of every path of the document; not the one that ends the controller under test."""
    for path, methods in schema.raw_schema["paths"].items():
        if path != "/v1/down":
            yield from ((method, path) for method in methods)


def one_test(method, path):
    def test(case, api):
        as_documented(case, api)

    bounded = settings(
        max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    return schema.include(method=method.upper(), path=path).parametrize()(bounded(test))


# One function per operation: schemathesis gives all operations of one function the same test id, and pytest-xdist
# runs a test id once.
for method, path in documented_operations():
    globals()[f"test_{method}_{re.sub(r'[^a-z0-9]+', '_', path).strip('_')}_is_as_documented"] = (
        one_test(method, path)
    )
