"""Studies on servers of somebody else, with a tiny model.

1. Each trial is a run there, beside the server's own run and those of other studies. It is open while the trial runs.
2. A study uses several servers side by side.
3. One that serves other weights under the model's name is refused.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentjet import Swarm
from agentjet.cli.trial_servers import SharedServerSlot
from agentjet.errors import ConfigError
from agentjet.research.journal import StudyFolder, read_log
from agentjet.research.models import Arm, Hypothesis, Knob, Study, Subject, Trial
from agentjet.research.swarm_runner import SwarmRunner
from tests.e2e.researching import LONG, STEPS, Researcher, admin_of, server_options
from tests.e2e.server import Server
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


LINES = ((5, 1 / 3), (6, 1.0), (5, 1.0))
"""Seeds and fidelities: the third trial continues the first."""


def slot_of(server: Server) -> SharedServerSlot:
    return SharedServerSlot(server.url, admin_of(server), print)


def runs_of(server: Server) -> dict[str, bool]:
    """The runs of studies, and whether they are open."""
    with Swarm(server.url, admin_of(server)) as swarm:
        return {run.name: run.is_open for run in swarm.runs() if run.path}


def test_a_run_of_a_study_beside_that_of_the_server(subject: Subject, tmp_path: Path) -> None:
    trials = [Trial("s", "a", {"job.optimizer.lr": 1e-3}, seed, "explore", fidelity) for seed, fidelity in LINES]
    with Server(Path(subject.model), tmp_path / "server", "--set", "job.checkpoint_every=0") as server:
        with ThreadPoolExecutor() as pool, SwarmRunner(subject, tmp_path, [slot_of(server)]) as runner:
            runner.launch("0", trials[0])
            first = pool.submit(runner.collect, "0")
            server.until(lambda: any(name.startswith(trials[0].run) for name in runs_of(server)))
            server.batch()
            for number, trial in enumerate(trials[1:], 1):
                runner.launch(str(number), trial)
            outcomes = [first.result(), *(runner.collect(str(number)) for number in range(1, len(trials)))]
        assert [(outcome.end, len(outcome.curve)) for outcome in outcomes] == [
            ("completed", 2),
            ("completed", STEPS + 1),
            ("completed", STEPS + 1),
        ]
        assert outcomes[2].curve[:2] == outcomes[0].curve  # the same run, gone on with
        assert list(runs_of(server).values()) == [False, False]
        assert server.get("/status")["policy_version"] == 1
        server.batch()


def test_a_server_of_other_weights_is_refused_whatever_they_are_called(subject: Subject, tmp_path: Path) -> None:
    other = make_model(tmp_path / "elsewhere" / Path(subject.model).name, seed=1)
    trials = [Trial("s", "a", {"job.optimizer.lr": 1e-3}, seed, "explore", 1 / 3) for seed in (5, 6)]
    with Server(Path(subject.model), tmp_path / "one") as one, Server(other, tmp_path / "two") as two:
        with SwarmRunner(subject, tmp_path, [slot_of(one)]) as runner:
            runner.launch("0", trials[0])
            assert runner.collect("0").end == "completed"
        with SwarmRunner(subject, tmp_path, [slot_of(two)]) as runner:
            runner.launch("1", trials[1])
            with pytest.raises(ConfigError, match=f"{two.url} serves other weights"):
                runner.collect("1")


def test_two_studies_on_the_same_two_servers(subject: Subject, tmp_path: Path) -> None:
    study, other = tuning_of(subject, "which rate?"), tuning_of(subject, "which rate, again?")
    model = Path(subject.model)
    with Server(model, tmp_path / "one") as one, Server(model, tmp_path / "two") as two:
        options = [option for server in (one, two) for option in server_options(server)]
        for folder, planned in (("study", study), ("other", other)):
            StudyFolder(tmp_path / folder).write(planned, "")
        studies = [Researcher(tmp_path / folder, *options) for folder in ("study", "other")]
        studies[0].until(lambda: all(sum(runs_of(server).values()) == 2 for server in (one, two)))
        for researcher in studies:
            assert researcher.process.wait(LONG) == 0, researcher.log
        assert [server.get("/status")["policy_version"] for server in (one, two)] == [0, 0]
        runs = [runs_of(server) for server in (one, two)]

    assert not any(is_open for there in runs for is_open in there.values())
    for folder in ("study", "other"):
        log = read_log(tmp_path / folder / "study.sqlite")
        assert len(log.trials) == 4 and {log.outcomes[name][0].end for name in log.trials} == {"completed"}
        names = {trial.run for trial in log.trials.values()}
        placed = [{name.partition("-")[0] for name in there} & names for there in runs]
        assert all(placed) and placed[0] | placed[1] == names and not placed[0] & placed[1]
    log = read_log(tmp_path / "study" / "study.sqlite")
    for [outcome] in log.outcomes.values():
        assert outcome.facts["learner_changes"] == STEPS and outcome.facts["sampler_changes"] == 1.0
    assert (tmp_path / "study" / "report.html").exists()


def tuning_of(subject: Subject, topic: str) -> Study:
    """A study that can pay for tuning one arm and for no seed that confirms: four runs."""
    return Study(
        topic=topic,
        metric="length of the answer modulo 5",
        sesoi=0.5,
        arms=(Arm("tuned", {}, (Knob("job.optimizer.lr", (1e-3, 1e-2)),)), Arm("fixed", {"job.optimizer.lr": 1e-5})),
        hypotheses=(Hypothesis("tuning helps", "tuned", "fixed"),),
        budget=6.7,
        looks=(4,),
        rungs=(1.0,),
        subject=subject,
    )
