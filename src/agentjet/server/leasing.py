"""Lease routes under `/swarm/v1/`: a server for one holder alone, who may have it serve runs of its own."""

from __future__ import annotations

from agentjet.config import parse_job
from agentjet.errors import ConfigError, Conflict, InvalidRequest
from agentjet.protocol import LeaseRequest, LeaseView, RunRequest, StatusResponse
from agentjet.server.control import admin, control_router, problems_of, viewer
from agentjet.server.wiring import LeaseEpoch, Wired, Wiring

router = control_router("lease")


@router.get("/lease", dependencies=viewer)
async def get_lease(wired: Wired) -> LeaseView:
    """Who has the server for itself, and which run it serves."""
    return _view(wired)


@router.put("/lease", dependencies=admin, responses=problems_of(409))
async def put_lease(body: LeaseRequest, wired: Wired) -> LeaseView:
    """Take the lease, or renew it. Whoever does not show its epoch in `AgentJet-Lease` begins no episode meanwhile."""
    wired.lease.take(body)
    return _view(wired)


@router.delete("/lease", dependencies=admin)
async def delete_lease(wired: Wired) -> LeaseView:
    """End the lease, whoever has it; the server goes back to its own run."""
    await wired.runs.enter("", None)
    wired.lease.end()
    return _view(wired)


@router.put("/run", dependencies=admin, responses=problems_of(409, 503))
async def put_run(body: RunRequest, wired: Wired, epoch: LeaseEpoch = None) -> StatusResponse:
    """Serve a run of the lease's holder: from the base model, or from where it was left. The answer does not wait for
    the worker.
    """
    if epoch is None:
        raise Conflict("Runs are served under a lease: take one first, and show its epoch.", code="no_lease")
    wired.lease.check(epoch)
    try:
        job = parse_job(body.job)
    except ConfigError as error:
        raise InvalidRequest(str(error), code="invalid_setting", status=422, param="job") from None
    try:
        await wired.runs.enter(body.name, job)
    except ConfigError as error:
        raise Conflict(f"Run {body.name!r} cannot be served here: {error}.", code="run_refused") from None
    return wired.gateway.status()


def _view(wired: Wiring) -> LeaseView:
    lease = wired.lease
    left = lease.seconds_left
    return LeaseView(holder=lease.holder if left else "", epoch=lease.epoch, seconds_left=left, run=wired.runs.name)
