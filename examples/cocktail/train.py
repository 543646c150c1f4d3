"""Makes two virtual environments, starts a server and three clients, and measures each task set's share of the batches.

    python -m examples.cocktail.train --out cocktail

`addition` and `subtraction` run with OpenAI's SDK 1, `reasoning` with SDK 3 and reasoning-gym: no single environment
can hold both. An episode of `reasoning` takes ten times as long. `result.json` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import venv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SETTINGS = HERE / "job.toml"
ENVIRONMENTS = {"addition": "sums", "subtraction": "sums", "reasoning": "reasoning"}
"""Task set to environment: the name of a file in `environments/`."""
STOP_SECONDS = 10.0


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    server_dir = options.out / "server"
    if server_dir.exists():
        raise SystemExit(f"{server_dir} is there already: give another folder with --out, or remove it")
    options.out.mkdir(parents=True, exist_ok=True)
    pythons = {name: make_environment(name, options.out) for name in sorted(set(ENVIRONMENTS.values()))}
    with raise_on_signals(), ChildServer(SETTINGS, options.set, server_dir) as server, server.connect():
        clients = run_clients(server.url, server_dir, {name: pythons[env] for name, env in ENVIRONMENTS.items()})
    result = summary(load_config(SETTINGS, options.set).job.task_weights, clients)
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


def summary(weights: Mapping[str, float], clients: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of `result.json`: each task set's share by weight, and its mean share of the batches' groups."""
    return {
        "batches": len(clients[0]["shares"]),
        "task_sets": {
            client["task_set"]: {
                "weight": round(weights[client["task_set"]] / sum(weights.values()), 4),
                "share": round(fmean(client["shares"]), 4),
                **client,
            }
            for client in clients
        },
    }


def make_environment(name: str, out: Path) -> Path:
    """A virtual environment with AgentJet's client and the packages of `environments/<name>.txt`, made once. Returns
    its Python."""
    folder = out / "environments" / name
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        wanted = ["-e", str(ROOT), "-r", str(HERE / "environments" / f"{name}.txt")]
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted], check=True)
        complete.touch()
    return python


def run_clients(url: str, server_dir: Path, pythons: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Runs one client process for each task set, with the interpreter given for it; they begin together. Returns their
    results. Raises `SystemExit` if one fails, and ends the others."""
    # Without PYTHONPATH: a client sees its own environment and this folder, nothing of ours.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"AGENTJET_URL": url, "AGENTJET_TOKEN": (server_dir / "token").read_text().strip()}
    with ExitStack() as running:
        clients = {}
        for name, python in pythons.items():
            command = [python.absolute(), "-m", "examples.cocktail.client", name, "--together"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            client = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
            clients[name] = running.enter_context(client)
            running.callback(_end, client)
        for client in clients.values():
            client.stdout.readline()  # "ready", or nothing of one that has failed
        for client in clients.values():
            client.stdin.close()
        said = {name: client.stdout.read() for name, client in clients.items()}
        for client in clients.values():
            client.wait()
    failed = [name for name, client in clients.items() if client.returncode != 0]
    if failed:
        raise SystemExit(f"the clients of {', '.join(failed)} failed; what they say of it stands above")
    return [json.loads(text.splitlines()[-1]) for text in said.values()]


def _end(client: subprocess.Popen[str]) -> None:
    if client.poll() is None:
        client.terminate()
        try:
            client.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cocktail"), help="folder of the environments and the results")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
