"""Records what the locks compare with; the docstring of `tests.locks` has the commands.

Data dirs: the server and its HTTP are real, the worker is scripted, and time passes by steps. Each is copied while its
server runs, as after a kill.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentjet import Episode, Swarm, Task
from agentjet.cli.checkpoints import branch, roll_back
from agentjet.front.keys import SECRET_FILES
from agentjet.types import JOURNAL
from examples.arithmetic.agent import FEEDBACK, QUESTION, ask, training_tasks
from tests.compute.test_locks import machine
from tests.e2e.server import Server
from tests.locks import long_run as history
from tests.locks import test_reading, transcripts
from tests.locks.answers import forms, write
from tests.locks.data_dirs import (
    ADD,
    DEMO,
    EARLIER,
    JOB,
    JOBS,
    MACHINE,
    NOW,
    RECORDED,
    TOOLS,
    looked_at,
    opened,
    starting,
)
from tests.server.serving import ADMIN, TOKEN, Served
from tests.tiny import make_model

DEMO_SETTINGS = "examples/arithmetic/job.toml"
START = 1_790_000_000.0
PLACE = Path("/tmp/agentjet-locks")
"""Folder of the recording: the journal of a branch has the path of its source."""
Body = dict[str, Any]


@dataclass
class Client:
    """A client of a run, in a few words. Each of its steps takes some seconds."""

    served: Served
    run: str = ""
    token: str = TOKEN

    async def ask(self, method: str, path: str, body: Any = None, *, token: str = "", **headers: str) -> Any:
        """Returns the JSON of an answer. Raises unless the status is 200."""
        self.served.run.clock.advance(1.5)
        headers["Authorization"] = f"Bearer {token or self.token}"
        prefix = f"/runs/{self.run}" if self.run else ""
        answer = await self.served.http.request(method, f"{prefix}{path}", json=body, headers=headers)
        assert answer.status_code == 200, f"{method} {path}: {answer.text}"
        return answer.json()

    async def post(self, path: str, **body: Any) -> Any:
        return await self.ask("POST", f"/swarm/v1{path}", body)

    async def begin(self, task: str, **body: Any) -> Body:
        request = {"task_id": task, "client_id": "trainer-a", "code_version": "v1"} | body
        return await self.post("/episodes", **request)

    async def call(self, episode: Body, messages: list[Body], *, retry: int = 0, **body: Any) -> Body:
        """The message of a chat completion, which becomes the last of `messages`."""
        request = {"model": "policy", "messages": messages, **body}
        headers = {"x-stainless-retry-count": str(retry)}
        answer = await self.ask("POST", "/v1/chat/completions", request, token=episode["api_key"], **headers)
        message: Body = answer["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        return message

    async def refused(self, episode: Body, path: str = "/v1/chat/completions", **body: Any) -> None:
        headers = {"Authorization": f"Bearer {episode['api_key']}"}
        answer = await self.served.http.post(path, json=body, headers=headers)
        assert 400 <= answer.status_code < 500, answer.text

    async def converse(self, episode: Body, question: str = "the sum of 12 and 30?") -> None:
        """Two calls: the policy uses the tool, and says its result."""
        messages: list[Body] = [{"role": "system", "content": "You add."}, {"role": "user", "content": question}]
        message = await self.call(episode, messages, tools=TOOLS)
        for call in message["tool_calls"] or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
        await self.call(episode, messages, tools=TOOLS)

    async def finish(self, episode: Body, reward: float, **body: Any) -> None:
        await self.post(f"/episodes/{episode['episode_id']}/finish", reward=reward, **body)

    async def abort(self, episode: Body, reason: str) -> None:
        await self.post(f"/episodes/{episode['episode_id']}/abort", reason=reason)

    async def close(self, group: str, task_set: str = "", **body: Any) -> None:
        """The client begins no further episode of a group."""
        request = {"client_id": "trainer-a", "groups": [{"group": group, "task_set": task_set}]} | body
        await self.post("/groups/close", **request)

    async def group(self, task: str, *rewards: float, says: str = "hello", **body: Any) -> None:
        """A group whose members make one call each."""
        for reward in rewards:
            episode = await self.begin(task, **body)
            await self.call(episode, [{"role": "user", "content": f"{says} {task}"}])
            await self.finish(episode, reward, metrics={"turns": 1.0, "seconds": 1.5})

    async def learned(self, version: int) -> None:
        await self.until(lambda status: status["policy_version"] == version and status["state"] == "sampling")

    async def until(self, predicate: Callable[[Body], bool]) -> None:
        async with asyncio.timeout(30):
            while not predicate(await self.status()):
                await asyncio.sleep(0.01)

    async def status(self) -> Body:
        headers = {"Authorization": f"Bearer {self.token}"}
        prefix = f"/runs/{self.run}" if self.run else ""
        status: Body = (await self.served.http.get(f"{prefix}/swarm/v1/status", headers=headers)).json()
        return status

    async def change_job(self, **changes: Any) -> None:
        body = await self.ask("GET", "/swarm/v1/job")
        job = {**body["job"], **changes}
        await self.ask("PUT", "/swarm/v1/job", {"revision": body["revision"], "job": job}, token=ADMIN)

    async def evaluate(self, version: int, score: float, **body: Any) -> None:
        await self.post("/evaluations", policy_version=version, score=score, num_tasks=2, num_episodes=2, **body)


# ---- small -----------------------------------------------------------------------------------------------------------


async def small(served: Served) -> None:
    """Every kind of episode, group, batch and call; a run of two policies; a run that was ended."""
    client = Client(served)
    await rewarded_turns(client)
    await client.learned(1)
    await client.evaluate(1, 0.25, name="sums", task_list="sums-1")
    await every_call(client)
    await client.learned(2)
    await client.evaluate(2, 0.5, name="sums", task_list="sums-1", client_id="judge")
    await client.evaluate(2, 0.9, name="train sums", held_out=False)
    await client.change_job(recipe={"name": "grpo", "drop_zero_variance": True}, max_staleness=1)
    await every_end(client)
    await client.learned(3)
    await client.post("/sft", demonstrations=list(map(demonstration, range(3))), lr=1e-3)
    await client.learned(4)
    await client.ask("PUT", "/swarm/v1/tags/before-v2", {"policy_version": 4})
    await evaluation(client)
    await client.post("/exports")
    await two_policies(served)
    await unfinished(client)


async def rewarded_turns(client: Client) -> None:
    """Conversations with tools, a judge with a role, and rewards of roles, turns and calls."""
    for task, member in itertools.product(("12+30", "1+2"), range(2)):
        episode = await client.begin(task, task_set="math")
        await client.converse(episode)
        await client.call(episode, [{"role": "user", "content": "judge it"}], model="policy@judge")
        rewards = {"by_role": {"judge": 0.25}, "by_turn": {"": [0.5, float(member)], "judge": [0.125]}}
        text = 'expected 42 €\n"got" 13' if not member else ""
        await client.finish(episode, float(member), metrics={"turns": 2.0}, text=text, **rewards)


async def every_call(client: Client) -> None:
    """Forks, a retry, a side call, sets of allowed tokens, a given seed, refused and noted keys, odd names."""
    for member in range(2):
        episode = await client.begin("row\x1b[31m\ttab", task_set="code", client_id="trainer-b", code_version="v1")
        messages = [{"role": "user", "content": "hello é🙂 <|im_end|>"}]
        await client.call(episode, messages, top_k=5, temperature=0.7, seed=3)
        messages.append({"role": "user", "content": "and now?"})
        await client.call(episode, messages[:], logprobs=True, user="me", store=True)
        if not member:
            await client.call(episode, messages[:], retry=1, logprobs=True, user="me", store=True)
            edited = [{"role": "user", "content": "another past"}, *messages[1:]]
            await client.call(episode, edited)
            titled = [{"role": "system", "content": "You are a title generator."}, messages[0]]
            await client.call(episode, titled)
            schema = {"name": "sum", "schema": ADD, "strict": True}
            await client.call(episode, [messages[0]], response_format={"type": "json_schema", "json_schema": schema})
            await client.refused(episode, model="policy", messages=messages, best_of=3)
            await client.refused(episode, model="gpt", messages=messages)
        await client.finish(episode, [0.25, 0.75][member], metrics={"turns": 2.0, "odd/é": -1.0})
    await client.group("x", 0.0, 1.0, task_set="code", client_id="trainer-b", says="the sum")


async def every_end(client: Client) -> None:
    """Episodes and groups that end without being trained, each for its reason."""
    clock = client.served.run.clock
    await client.group("same", 1.0, 1.0, task_set="math", code_version="v2")  # zero_variance
    for number in range(2):
        lost = await client.begin(f"slow-{number}", task_set="code", code_version="v2")
        await client.call(lost, [{"role": "user", "content": "wait"}])
        await client.abort(lost, f"Timeout: the tool did not answer in {60 + number} s")
        await client.close(f"code/slow-{number}", "code")  # no_members
    await client.abort(await client.begin("broken", code_version="v2"), "JSONDecodeError: line 1\ncolumn 2")
    await client.close("broken")
    silent = await client.begin("silent", task_set="code", client_id="trainer-b")
    await client.call(silent, [{"role": "user", "content": "silence"}])
    clock.advance(JOB["lease_seconds"] + 1)
    await client.until(lambda status: status["episodes"]["expired"] == 1)
    await client.close("code/silent", "code", client_id="trainer-b")
    for process in ("one", "two"):  # The second replaces the first.
        replaced = await client.begin("again", client_id="trainer-c", instance_id=process)
    await client.abort(replaced, "interrupted")
    await client.close("again", client_id="trainer-c")
    await client.group("alone", 1.0, task_set="math", code_version="v2")
    await client.close("math/alone", "math")  # too_few
    for _ in range(2):  # no_tokens
        await client.finish(await client.begin("quiet", task_set="math", code_version="v2"), 0.5)
    await client.begin("unneeded", task_set="math", code_version="v2")
    await client.close("math/unneeded", "math", not_needed=True)  # surplus
    await client.group("3+4", 0.0, 1.0, task_set="math", code_version="v2")
    await client.group("5+6", 1.0, 0.5, task_set="code", code_version="v2")


async def evaluation(client: Client) -> None:
    """Episodes of an evaluation, one of which fails."""
    version = (await client.status())["policy_version"]
    for task in ("7+8", "9+9"):
        episode = await client.begin(
            task, task_set="held out", mode="eval", at_version=version, temperature=0.0, seed=7
        )
        await client.converse(episode)
        await client.finish(episode, 1.0, text="right")
    failed = await client.begin("0+0", task_set="held out", mode="eval")
    await client.abort(failed, "ConnectionError: refused")
    await client.evaluate(version, 0.75, name="sums", task_list="sums-1")


def demonstration(number: int) -> Body:
    answer = {"role": "assistant", "content": f"{number} € 🙂"}
    return {"task_id": f"shown.jsonl:{number}", "messages": [{"role": "user", "content": f"count {number}"}, answer]}


async def two_policies(served: Served) -> None:
    """A run of the policies planner and critic, which learns a batch; and a run that was ended."""
    admin = Client(served, token=ADMIN)
    job = {"batch_size": 1, "group_size": 2, "max_tokens": 32, "recipe": "dr_grpo"}
    await admin.ask("PUT", "/swarm/v1/runs/team", {"policies": {"planner": {}, "critic": {}}, "job": job})
    await admin.ask("PUT", "/swarm/v1/runs/ended", {"job": job})
    await admin.ask("DELETE", "/swarm/v1/runs/ended")
    token = (served.run.folder.parent / "team" / SECRET_FILES["client"]).read_text().strip()
    team = Client(served, run="team", token=token)
    await team.learned(0)
    for member in range(2):
        episode = await team.begin("plan", task_set="plans")
        for model in ("planner", "critic", "planner@title"):
            await team.call(episode, [{"role": "user", "content": f"hello {model}"}], model=model)
        by_role = {"planner": float(member), "critic": 1.0 - member, "planner/title": 0.5}
        await team.finish(episode, 0.5, by_role=by_role)
    await team.learned(1)
    await team.begin("plan", task_set="plans")


async def unfinished(client: Client) -> None:
    """The present batch: a complete group, open groups with live, finished and failed members, a live evaluation."""
    await client.group("complete", 0.0, 1.0, task_set="math", code_version="v2")
    await client.group("half", 1.0, task_set="code", code_version="v2")
    talking = await client.begin("half", task_set="code", code_version="v2")
    await client.converse(talking)
    failed = await client.begin("begun", client_id="trainer-b")
    await client.abort(failed, "Timeout: the tool did not answer in 62 s")
    await client.begin("begun", client_id="trainer-b")
    await client.begin("7+8", mode="eval", task_set="held out", client_id="judge")
    client.served.run.clock.advance(30)


# ---- long ------------------------------------------------------------------------------------------------------------


def record_long() -> None:
    """The run of `bench.face`, with the calls of its newest batch only. Its server starts at its checkpoint."""
    history.KEPT_BATCHES, metrics = 1, history._metrics
    history._metrics = lambda *step: {name: round(value, 2) for name, value in metrics(*step).items()}  # Small archive.
    history.write(PLACE / "long", steps=500, long_tokens=300, now=START)
    pack("long", START)


# ---- rolled back and branched ----------------------------------------------------------------------------------------


async def batch(client: Client, version: int, **body: Any) -> None:
    """The batch that leads from `version` to the next one, and its evaluation."""
    await client.group("12+30", 0.0, 1.0, task_set="math", **body)
    await client.group("x", 0.25, 0.75, task_set="code", **body)
    await client.learned(version + 1)
    await client.evaluate(version + 1, 0.125 * (version % 5), name="sums", task_list="sums-1")


async def before_rollback(served: Served) -> None:
    client = Client(served)
    for version in range(4):
        await batch(client, version)
        if version == 1:
            await client.ask("PUT", "/swarm/v1/tags/good", {"policy_version": 2})
    await client.group("waiting", 0.0, 1.0)
    await client.begin("live")


async def after_rollback(served: Served) -> None:
    client = Client(served)
    version = (await client.status())["policy_version"]
    for number in range(2):
        await batch(client, version + number, code_version="v2")
    await client.group("half", 1.0, code_version="v2")
    await client.begin("live")


async def after_branch(served: Served) -> None:
    client = Client(served)
    await client.change_job(recipe="dr_grpo")
    for number in range(2):
        await batch(client, (await client.status())["policy_version"], code_version=f"v{3 + number}")
    await client.begin("live")


# ---- the demo --------------------------------------------------------------------------------------------------------


def two_tries(task: Task, episode: Episode) -> float:
    """The conversation of the demo's agent, with a reward that a random model gets for some answers."""
    a, b = task.payload
    messages: list[Any] = [{"role": "user", "content": QUESTION.format(a=a, b=b)}]
    first = ask(episode, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": FEEDBACK}]
    return sum(map(ord, first + ask(episode, messages))) % 7 / 6


def record_demo() -> None:
    """Six batches by real processes, without a checkpoint; only the journal is kept, and the model."""
    data_dir, run = PLACE / DEMO, PLACE / DEMO / "runs" / "default"
    run.mkdir(parents=True)
    model = make_model(data_dir / "model", layers=1, hidden=16)
    small: dict[str, Any] = {"job__batch_size": 2, "job__group_size": 4}
    with Server(model, PLACE / "served", "--config", DEMO_SETTINGS, **small) as server:
        with Swarm(server.url, token=server.token) as swarm:
            swarm.train(two_tries, training_tasks(), steps=6, concurrency=8, seed=0, progress=False)
        with (
            closing(sqlite3.connect(server.folder / JOURNAL)) as served,
            closing(sqlite3.connect(run / JOURNAL)) as kept,
        ):
            served.backup(kept)
        server.kill()
    (data_dir / MACHINE).write_text(f"{machine()}\n")
    pack(DEMO, time.time())


# ---- the recording ---------------------------------------------------------------------------------------------------


async def play(name: str, now: float, *scenes: Callable[[Served], Awaitable[None]]) -> float:
    """Plays scenes on a server of `PLACE / name`, then keeps the data dir as a kill leaves it. Returns the time."""
    killed = PLACE / f"{name}.killed"
    async with starting(name, PLACE / name, now=now) as served:
        for scene in scenes:
            await scene(served)
        await asyncio.sleep(1)  # Rows that the run needs no more are deleted in the background.
        shutil.copytree(PLACE / name, killed, ignore=shutil.ignore_patterns("*.lock"))
        now = served.run.clock()
    shutil.rmtree(PLACE / name)
    killed.rename(PLACE / name)
    return now


def pack(name: str, now: float) -> None:
    """Writes the archive of `PLACE / name`: small journals, no tokens, times of whole seconds."""
    (PLACE / name / NOW).write_text(f"{now}\n")
    for path in PLACE.glob(f"{name}/runs/*/journal.sqlite"):
        with closing(sqlite3.connect(path)) as journal:
            journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            journal.execute("VACUUM")
            journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def member(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = int(info.mtime)
        left_out = Path(info.name).name in SECRET_FILES.values() or info.name.endswith((".lock", "-shm", "-wal"))
        return None if left_out else info

    RECORDED.mkdir(exist_ok=True)
    with tarfile.open(RECORDED / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        archive.add(PLACE / name, name, filter=member)


async def record_branched() -> None:
    await play("rolled", START, before_rollback)
    roll_back(PLACE / "rolled", "good")  # Its clock is the machine's.
    now = await play("rolled", time.time(), after_rollback)
    branch(PLACE / "rolled", "good", PLACE / "branched")
    branched = await play("branched", now + 600, after_branch)
    pack("rolled", now)
    pack("branched", branched)


async def record_data_dir(name: str) -> None:
    if name in (DEMO, "long"):
        await asyncio.to_thread(record_demo if name == DEMO else record_long)
    elif name == "branched":
        await record_branched()
    else:
        pack(name, await play(name, START, small))


def record_data_dirs(names: Sequence[str]) -> None:
    """Records `small`, `long`, `branched` with `rolled`, and `demo`; or some of these."""
    numbers = itertools.count(1)
    # Ids of few bits make small archives.
    secrets.token_hex = lambda nbytes=8: f"{next(numbers):0{2 * nbytes}x}"  # type: ignore[assignment,misc]
    for name in names or ("small", "long", "branched", DEMO):
        shutil.rmtree(PLACE, ignore_errors=True)
        PLACE.mkdir()
        asyncio.run(record_data_dir(name))
        shutil.rmtree(PLACE)


def record_answers(names: Sequence[str]) -> None:
    """Records the answers over all data dirs, or over some of them."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for name in names or (*JOBS, EARLIER):
            if name != EARLIER:
                with opened(name, place / "server") as (source, served):
                    write(f"{name}.server", test_reading.present_of_server(source, served))
                    write(f"{name}.commands", test_reading.present_of_commands(source))
                    if name == "small":
                        write("openapi", forms(served.app.openapi()))
            with looked_at(name, place / "look") as source:
                write(f"{name}.look", test_reading.present_of_look(source, name))
        write("folders.commands", test_reading.present_of_folders(place / "folders"))


def record_transcripts(names: Sequence[str]) -> None:
    """Records all transcripts, or some of them."""
    with tempfile.TemporaryDirectory() as scratch:
        transcripts.record_all(Path(scratch), names)


if __name__ == "__main__":
    _, what, *rest = sys.argv
    {"data-dirs": record_data_dirs, "answers": record_answers, "transcripts": record_transcripts}[what](rest)
