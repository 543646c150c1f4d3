"""Groups that mix states of an agent's code, over random edits in the middle of groups: `train(reload=True)` and
`run --watch`.

    python -m bench.mixed_code --edits 100

The real client trains against a server in memory; weights are not needed. The agent reports a number of each of its
parts: its own file, a helper, a module of a subfolder, one that is imported inside a function, and data files. Every
third episode or so edits one part in its middle, in place or through a new file. Two members of a group that report
different numbers are a mixed group.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from agentjet.cli.program import CommandLine, CommandSource, reward_source
from agentjet.client import AsyncSwarm, Command
from agentjet.types import Reward, Task
from tests.client.server import TOKEN, URL, FakeServer, FakeTime

TASKS = [Task(f"t{number}") for number in range(20)]
LOOKS = """
import json, time
from pathlib import Path
import {helper}
from {sub} import deep
VALUE = 0
HERE = Path(__file__).parent

def look():
    import {lazy}
    return {{"own": VALUE, "helper": {helper}.VALUE, "deep": deep.VALUE, "lazy": {lazy}.VALUE,
        "prompt": int((HERE / "prompt.txt").read_text()), "page": int((HERE / "{sub}" / "page.md").read_text())}}
"""
AGENT = """
async def agent(task, episode):
    before = look()
    await MIXED_CODE_EDIT()
    after = look()
    assert before == after, "one episode saw two states"
    return REWARD(0.0, metrics=after)
"""
PROGRAM = """
before = look()
time.sleep(0.05)
assert before == look(), "one episode saw two states"
print(json.dumps({"reward": 0, "metrics": {name: float(value) for name, value in before.items()}}))
"""


@dataclass
class Author:
    """Edits one random part of the agent at random moments."""

    folder: Path
    prefix: str
    num_edits: int
    draw: random.Random
    num_done: int = 0
    parts: list[Path] = field(default_factory=list)

    def write_all(self, end: str) -> None:
        names = {name: f"{self.prefix}_{name}" for name in ("helper", "sub", "lazy")}
        (self.folder / names["sub"]).mkdir()
        agent = self.folder / f"{self.prefix}_agent.py"
        agent.write_text(LOOKS.format(**names) + end)
        modules = [names["helper"], f"{names['sub']}/deep", names["lazy"]]
        texts = {f"{name}.py": "VALUE = 0\n" for name in modules}
        texts |= {"prompt.txt": "0", f"{names['sub']}/page.md": "0"}
        for name, text in texts.items():
            (self.folder / name).write_text(text)
        self.parts = [agent, *(self.folder / name for name in texts)]

    def edit(self) -> None:
        """One edit, unless all are done."""
        if self.num_done == self.num_edits:
            return
        self.num_done += 1
        part = self.draw.choice(self.parts)
        lines = part.read_text().splitlines()
        place = lines.index(next(line for line in lines if line.startswith("VALUE") or line.isdecimal()))
        lines[place] = f"VALUE = {self.num_done}" if lines[place].startswith("VALUE") else str(self.num_done)
        target = part if self.draw.random() < 0.5 else part.with_name(part.name + "~")
        target.write_text("\n".join(lines) + "\n")
        os.replace(target, part)

    def perhaps_edit(self) -> None:
        if self.draw.random() < 0.35:
            self.edit()


def mixed_code(edits: int = 100) -> dict[str, Any]:
    """The groups of both ways, and those of them that mixed states; half of the edits each."""
    found = {name: _counted(way, edits // 2) for name, way in (("reload", _reload), ("watch", _watch))}
    return {
        "edits": sum(one["edits"] for one in found.values()),
        "groups": sum(one["groups"] for one in found.values()),
        "states": sum(one["states"] for one in found.values()),
        "mixed_code": sum(one["mixed"] for one in found.values()),
        **found,
    }


def _counted(way: Callable[[Author, FakeServer], None], edits: int) -> dict[str, int]:
    server = FakeServer(batch_size=2, group_size=3)
    with tempfile.TemporaryDirectory(prefix="mixed-code-") as folder:
        place = Path(folder, "agent")
        place.mkdir()
        author = Author(place, f"mixed_code_{way.__name__.strip('_')}", edits, random.Random(edits))
        while author.num_done < edits:
            way(author, server)
    groups: dict[str, set[tuple[tuple[str, float], ...]]] = {}
    for view in server.episodes.values():
        if view.status == "finished":
            groups.setdefault(view.group, set()).add(tuple(sorted(view.metrics.items())))
    states = set().union(*groups.values())
    mixed = sum(len(seen) > 1 for seen in groups.values())
    return {"edits": author.num_done, "groups": len(groups), "states": len(states), "mixed": mixed}


def _train(server: FakeServer, agent: Any, code: Any) -> None:
    async def train() -> None:
        retry = FakeTime().retry()
        async with AsyncSwarm(URL, TOKEN, transport=server.transport(), retry=retry) as swarm:
            await swarm.train(agent, TASKS, steps=10, concurrency=4, progress=False, reload=code)

    asyncio.run(train())


def _reload(author: Author, server: FakeServer) -> None:
    import builtins

    async def edit() -> None:
        for _ in range(author.draw.randrange(6)):
            await asyncio.sleep(0)
        author.perhaps_edit()

    vars(builtins).update(MIXED_CODE_EDIT=edit, REWARD=Reward)
    if not author.parts:
        author.write_all(AGENT)
    sys.path.insert(0, str(author.folder))
    try:
        importlib.invalidate_caches()
        agent = importlib.import_module(author.parts[0].stem).agent
        _train(server, agent, True)
    finally:
        sys.path.remove(str(author.folder))
        for name in [name for name in sys.modules if name.startswith(author.prefix)]:
            del sys.modules[name]
        del builtins.MIXED_CODE_EDIT, builtins.REWARD  # type: ignore[attr-defined]


def _watch(author: Author, server: FakeServer) -> None:
    if not author.parts:
        author.write_all(PROGRAM)
    source, score = CommandLine((sys.executable, author.parts[0].name), author.folder), reward_source("stdout")[0]

    def scored(task: Any, result: Any) -> Any:
        author.perhaps_edit()  # while other members of the group run, and before the last ones begin
        return score(task, result)

    command = Command(source.resolved(author.folder), scored)
    with tempfile.TemporaryDirectory(prefix="agentjet-code-", ignore_cleanup_errors=True) as copies:
        _train(server, command, CommandSource(source, command, None, Path(copies)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Groups that mix states of an agent's code.")
    parser.add_argument("--edits", type=int, default=100)
    edits = parser.parse_args().edits
    with redirect_stdout(StringIO()):
        found = mixed_code(edits)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
