"""The first example of the README, run as it is printed: `python -m bench.readme`.

The commands and `train.py` are read from README.md and executed unchanged, in an empty folder that has only a link to
the virtual environment. If port 8400 is in use, `--set server.port` and AGENTJET_URL select another one.

Prints a table, then one JSON object as the last line: `before` and `after` are the held-out success that the example
prints, `seconds` counts from the start of the server to the end of the last command. The exit code is 1 if the success
rose by less than 0.4 or the example took more than 300 s.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.machine import bounded, free_port, report

README = Path(__file__).parents[1] / "README.md"
SECTION = "## Train your own agent\n"
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
READY = "agentjet status"  # The server prints this when the model is loaded
READY_SECONDS = 300.0

PORT = 8400
MIN_GAIN = 0.4
MAX_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Example:
    """The three blocks of the section, in the order in which a reader uses them."""

    serve: str
    train: str
    commands: str

    @classmethod
    def read(cls, page: Path = README) -> Example:
        """The first bash, python and bash block of the section "Train your own agent"."""
        section = page.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
        (first, serve), (second, train), (third, commands) = FENCE.findall(section)[:3]
        assert (first, second, third) == ("bash", "python", "bash"), "the section's blocks are in another order"
        return cls(serve, train, commands)

    def changed(self, written: str, here: str) -> Example:
        """The example with one replacement, which must apply."""
        blocks = [block.replace(written, here) for block in (self.serve, self.train, self.commands)]
        assert blocks != [self.serve, self.train, self.commands], f"{written!r} is not in the example"
        return Example(*blocks)


@dataclass(frozen=True, slots=True)
class Run:
    """The example's output and its durations."""

    output: str
    ready_seconds: float
    seconds: float
    port: int

    def success(self, when: str) -> float:
        """The held-out success that the example printed, `when` is "before" or "after"."""
        found = re.search(rf"^held-out sums {when}: +mean@\d+ ([\d.]+)", self.output, re.MULTILINE)
        assert found, f"no held-out success {when} in:\n{self.output}"
        return float(found[1])


def run(example: Example, folder: Path, *, port: int, echo: bool = False) -> Run:
    """Execute the example in an empty `folder`. Raises `CalledProcessError` if one of its commands fails."""
    (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    (folder / "train.py").write_text(example.train, encoding="utf-8")
    own = {name: value for name, value in os.environ.items() if not name.startswith("AGENTJET_")}
    started = time.monotonic()
    with _served(f"{example.serve.strip()} --set server.port={port}", folder, own):
        ready = time.monotonic() - started
        output = []
        with subprocess.Popen(
            ["bash", "-ec", example.commands],
            cwd=folder,
            env={**own, "AGENTJET_URL": f"http://127.0.0.1:{port}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                output.append(line)
                if echo:
                    print(line, end="", file=sys.stderr, flush=True)
        seconds = time.monotonic() - started
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, example.commands, "".join(output))
    return Run("".join(output), ready, seconds, port)


@contextmanager
def _served(command: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """The server of the example, from the moment it is ready; stopped with Ctrl-C."""
    log = folder / "serve.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while READY not in (said := log.read_text(encoding="utf-8", errors="replace")):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready:\n{said}")
            time.sleep(0.1)
        yield
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
            server.wait(120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="append --set job.seed=SEED to the server's command")
    arguments = parser.parse_args()
    example = Example.read()
    if arguments.seed is not None:
        example = replace(example, serve=f"{example.serve.rstrip()} --set job.seed={arguments.seed}\n")
    with tempfile.TemporaryDirectory(prefix="agentjet-readme-") as folder:
        done = run(example, Path(folder), port=free_port(PORT), echo=True)
    before, after = done.success("before"), done.success("after")
    verdict = {
        "before": before,
        "after": after,
        "seconds": round(done.seconds, 1),
        "ready_seconds": round(done.ready_seconds, 1),
        "seed": arguments.seed,
        "port": done.port,
    }
    report("readme", verdict, bounded(verdict, {"after": before + MIN_GAIN}, {"seconds": MAX_SECONDS}), machine=False)
    return 0 if after >= before + MIN_GAIN and done.seconds <= MAX_SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
