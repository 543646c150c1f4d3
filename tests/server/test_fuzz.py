"""Fuzzing of every route, with valid and invalid requests, in every role.

1. No request leads to an internal error, to a status that `/openapi.json` does not declare, or to a body that does not
   match its schema.
2. A key with odd bytes in a path gets an answer in the shape of the dialect.

`test_malformed` has almost valid bodies and keys.

A run makes about 2,000 requests of the first kind. `--hypothesis-profile=thorough` makes 100,000, in about half an hour
on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fakes import job_body
from tests.server.target import TOKENS, Role, Target, serving_target

pytestmark = pytest.mark.thorough
load_all_checks()

CASES = max(400, 10 * settings.default.max_examples)
"""Of each role."""
ENDLESS = "GET /swarm/v1/events"
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OWN_ERRORS = (503, 507)
"""Statuses from 500 on that are meant: later, and no room on the disk."""
HEALTH = list(HealthCheck)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with serving_target(tmp_path_factory.mktemp("fuzz") / "data") as target:
        yield target


def schema_of(target: Target) -> Any:
    return schemathesis.openapi.from_dict(target.app.openapi())


def meant(case: schemathesis.Case, target: Target, draw: st.DataObject) -> None:
    """Makes some cases more valid than chance would, and prevents long waits."""
    deep = draw.draw(st.integers(0, 3), label="deep")
    if deep and "episode_id" in case.path_parameters:
        case.path_parameters["episode_id"] = target.episode["episode_id"]
    if deep and "key" in case.path_parameters:
        case.path_parameters["key"] = target.episode["api_key"]
    if deep and case.path.startswith("/swarm/v1/runs/"):
        case.path_parameters["name"] = draw.draw(st.sampled_from(["fuzzed", "other", "default"]))
    if isinstance(case.body, dict):
        if isinstance(case.body.get("wait"), int | float):
            case.body["wait"] = 0
        if deep and "model" in case.body:
            case.body["model"] = "policy"
        if deep and "revision" in case.body:
            case.body |= {"revision": job_body(target.served.run.gateway).revision, "job": {"max_tokens": 16}}


@pytest.mark.parametrize("role", ["nobody", "viewer", "client", "admin", "agent"])
def test_every_route_answers_as_documented(target: Target, role: Role) -> None:
    operations = [found.ok() for found in schema_of(target).get_all_operations()]
    if role in TOKENS:
        operations = [operation for operation in operations if operation.label != ENDLESS]
    if role == "agent":  # Elsewhere it is refused early.
        conversing = [o for o in operations if o.method == "post" and not o.path.startswith("/swarm/")]
        operations += 4 * conversing
    kinds = [operation.as_strategy(generation_mode=mode) for operation in operations for mode in GenerationMode]

    @settings(max_examples=CASES, deadline=None, suppress_health_check=HEALTH, database=None)
    @given(case=st.sampled_from(kinds).flatmap(lambda kind: kind), draw=st.data())
    def run(case: schemathesis.Case, draw: st.DataObject) -> None:
        if draw.draw(st.integers(0, 3), label="refresh") or not target.episode:
            target.refresh()
        meant(case, target, draw)
        asked = requests.Request(**case.as_transport_kwargs(base_url="http://127.0.0.1")).prepare()
        answer = target.send(asked, role)
        target.seen[role, answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code in OWN_ERRORS, answer.text
        case.validate_response(answer, checks=CHECKS)

    run()
    seen = {status: count for (who, status), count in sorted(target.seen.items()) if who == role}
    print(f"{role}: {sum(seen.values())} requests, {seen}")
    assert sum(seen.values()) >= CASES
    assert seen.keys() >= {"nobody": {401}, "viewer": {200, 403}, "agent": {200, 403}}.get(role, {200})


@pytest.mark.parametrize("key", ["%0D", "%0A", "%09", "%00", "%20", "%C3%A9", "%ff", "..", "%2e%2e"])
def test_paths_with_strange_keys_answer_in_the_shape_of_their_dialect(target: Target, key: str) -> None:
    well = b'{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}'
    for body in (well, b'{"model": 1}', b"{"):
        answer = target.post(
            f"http://127.0.0.1/k/{key}/v1/chat/completions", {"Content-Type": "application/json"}, body
        )
        if answer.status_code == 404 and ".." in key:  # The client resolves it, and it is another path.
            continue
        assert answer.status_code == 401 and answer.json()["error"]["message"], (key, answer.text)


def test_the_checks_notice(target: Target) -> None:
    """The checks above detect an undocumented status and an undocumented shape."""
    [operation] = [f.ok() for f in schema_of(target).get_all_operations() if f.ok().label == "GET /swarm/v1/status"]
    case = operation.Case()
    request = httpx.Request("GET", "http://127.0.0.1/swarm/v1/status")
    for wrong in (
        httpx.Response(418, json={}, request=request),
        httpx.Response(200, json={"state": "asleep"}, request=request),
    ):
        wrong.elapsed = timedelta(0)
        with pytest.raises(FailureGroup):
            case.validate_response(wrong, checks=CHECKS)
