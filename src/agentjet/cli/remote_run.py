"""`RemoteRun`: a run of another server for `agentjet look`, read and forwarded over HTTP with a token."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import TypeAdapter

from agentjet.client.connection import load_settings
from agentjet.errors import AgentJetError, Later, RequestError, Unreachable
from agentjet.protocol import PREFIX, EvaluationView, JobBody, Problem, StatusResponse, StepList, flatten
from agentjet.server.look import Answer

TIMEOUT_SECONDS = 30.0
MOST_STEPS = 10_000
JSON_TYPES = ("application/json", "application/problem+json")
_EVALUATIONS = TypeAdapter(list[EvaluationView])


class RemoteRun:
    """The records of a run at `url`, the address of a server or of its run."""

    def __init__(self, url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises `ConfigError` if the URL or the token is malformed."""
        settings = load_settings(url, token)
        self.title = url
        self._http = httpx.AsyncClient(
            base_url=settings.url,
            headers={"Authorization": f"Bearer {settings.token}"} if settings.token else {},
            timeout=TIMEOUT_SECONDS,
            trust_env=not settings.is_loopback,  # A proxy of the environment would get the token.
            transport=transport,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def status(self) -> StatusResponse:
        return StatusResponse.model_validate_json(await self._read("/status"))

    async def steps(self) -> StepList:
        return StepList.model_validate_json(await self._read(f"/steps?limit={MOST_STEPS}"))

    async def evaluations(self) -> list[EvaluationView]:
        return _EVALUATIONS.validate_json(await self._read("/evaluations"))

    async def settings(self) -> dict[str, Any]:
        """Returns the model and the job settings, by name, for a comparison."""
        status, job = await self.status(), JobBody.model_validate_json(await self._read("/job"))
        weights = {"model_weights": status.model_weights} if status.model_weights else {}
        return {"model.name": status.model, **weights, **dict(flatten(job.job, "job."))}

    async def forward(self, target: str) -> Answer:
        """Returns the answer to a read. Raises `RequestError` if the server is silent, refuses the token, or answers
        something else than JSON."""
        try:
            found = await self._get(target)
        except Unreachable as error:
            raise Later(str(error), retry_after=1.0, code="server_unreachable", status=503) from None
        if found.status_code == 401:  # The session of the page is valid: this server refuses the token of `look`.
            raise RequestError(_refused(self.title, found), code="token_refused", status=502)
        if found.headers.get("Content-Type") not in JSON_TYPES:
            raise RequestError(_refused(self.title, found), code="server_unreadable", status=502)
        return Answer(found.status_code, found.headers["Content-Type"], found.content)

    async def _read(self, path: str) -> bytes:
        """Returns the body of a read. Raises `Unreachable`, or `AgentJetError` for a refusal."""
        found = await self._get(f"{PREFIX}{path}")
        if found.status_code != 200:
            raise AgentJetError(_refused(self.title, found))
        return found.content

    async def _get(self, target: str) -> httpx.Response:
        try:
            return await self._http.get(target)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{self.title} does not answer ({error or type(error).__name__}): start that server, or leave it out"
            ) from None


def _refused(url: str, found: httpx.Response) -> str:
    way_out = "give its viewer token: --token-file FILE or AGENTJET_TOKEN"
    try:
        problem = Problem.model_validate_json(found.content)
    except ValueError:
        return f"{url} answered {found.status_code} and is not a server of AgentJet of this version"
    return f"{url} answered: {problem.detail}" + (f" ({way_out})" if found.status_code in (401, 403) else "")
