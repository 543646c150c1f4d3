"""Trials on servers that Ray starts on the nodes of a cluster of two raylets.

1. A researcher is killed, then an actor in the middle of a trial, then a node: the study ends as if nothing had been,
   each trial in one attempt, from its newest step; every outcome has its machine; no server is left.
2. A wrong address is refused. Servers that find no GPU say so, and wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import psutil
import pytest

from agentjet.cli.trial_servers import Servers, ray_slots
from agentjet.errors import ConfigError
from agentjet.research.journal import StudyFolder, read_log
from agentjet.research.models import Subject
from agentjet.research.report import StudyView
from agentjet.research.swarm_runner import ServerUnavailable
from tests.e2e.researching import LONG, STEPS, Researcher, scores_of, study_of
from tests.processes.raylets import LocalCluster

pytestmark = [pytest.mark.needs("ray"), pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    made = LocalCluster(gpus=0)
    yield made
    made.shutdown()


def servers_of(folder: Path) -> list[psutil.Process]:
    """Servers on the nodes with a data dir in the folder. Guardians have `-I` in their command line."""
    found = [(one, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    servers = [(one, " ".join(words)) for one, words in found if "-I" not in words]
    return [one for one, words in servers if "serve_on_node" in words and str(folder) in words]


def training_server(folder: Path) -> psutil.Process | None:
    """A server in the middle of a trial."""
    for server in servers_of(folder):
        data_dir = Path(server.info["cmdline"][server.info["cmdline"].index("--data-dir") + 1])
        record = data_dir.parent / "record.json"
        if record.exists() and 2 <= len(scores_of(record)) <= STEPS:
            return server
    return None


def wait_for_server(researcher: Researcher) -> psutil.Process:
    found: list[psutil.Process] = []
    researcher.until(lambda: bool(found.extend(filter(None, [training_server(researcher.folder)])) or found))
    return found[0]


def test_machines_that_die_cost_time_only(subject: Subject, cluster: LocalCluster, tmp_path: Path) -> None:
    folder, node = tmp_path / "study", cluster.join(gpus=0)
    StudyFolder(folder).write(study_of(subject), "")
    options = ("--ray", "2", "--ray-address", cluster.address)
    first = Researcher(folder, *options)
    server = wait_for_server(first)
    first.process.kill()
    first.process.wait()
    _, alive = psutil.wait_procs([server, *servers_of(folder)], LONG)
    assert alive == []

    second = Researcher(folder, *options)
    wait_for_server(second).parents()[1].kill()  # the actor: the parent of the guardian
    second.until(lambda: second.log.count("the trial goes on elsewhere") == 1)
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    second.until(lambda: any(raylet in server.parents() for server in servers_of(folder)))
    raylet.kill()
    second.until(lambda: second.log.count("the trial goes on elsewhere") >= 2)
    assert second.process.wait(LONG) == 0, second.log

    log = read_log(folder / "study.sqlite")
    assert len(log.trials) == 8 and set(log.attempts.values()) == {1}, second.log
    outcomes = [outcome for [outcome] in log.outcomes.values()]
    assert {outcome.end for outcome in outcomes} == {"completed"}, second.log
    assert all(len(outcome.curve) == STEPS + 1 and " cores of " in outcome.machine["hardware"] for outcome in outcomes)
    assert StudyView(log).spending.total == 8.0
    assert servers_of(folder) == []


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "--ray-address 127.0.0.1:9: nothing listens there; `ray start --head` prints the address"),
        ("ray://head:1", "--ray-address ray://head:1 is not an address of a Ray cluster: give HOST:PORT of its head"),
    ],
)
def test_a_wrong_address(address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Servers(ray=1, ray_address=address).slots()


def test_servers_that_find_no_gpu_wait(cluster: LocalCluster, subject: Subject, tmp_path: Path) -> None:
    told: list[str] = []
    slots = ray_slots(3, cluster.address, 2, told.append)
    assert len(told) == 1 and told[0].startswith(
        "--ray 3 --ray-gpus 2: the cluster has 0 GPUs now, so 0 of the servers"
    )
    slots[0].check()
    slots[0].cluster._placement.placement_seconds = 1.0
    serving = slots[0].serve(tmp_path, {"model.name": subject.model}, Event())
    with (
        pytest.raises(ServerUnavailable, match="Ray server 1 needs 2 GPUs on one node, and none has them free"),
        serving,
    ):
        raise AssertionError("there is no GPU")
