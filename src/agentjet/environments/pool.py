"""`Pool`: the processes in which an environment lists its tasks and plays its episodes.

A process plays one episode at a time. It is replaced when it crashes, exceeds a limit, or its episode is cancelled.
Pipes are read in threads, because an asynchronous pipe would belong to one event loop, and a run may have several.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentjet.client.command import WITHHELD
from agentjet.client.threads import in_thread
from agentjet.environments.kind import EnvironmentFailed, Kind
from agentjet.environments.worker import ENDED, KILL_SECONDS, MAX_ANSWER
from agentjet.errors import ConfigError
from agentjet.sandbox import Limits, ProgramFolder, Sandbox, SandboxProcess
from agentjet.sandbox.sandbox import check_named

MAX_PRINTED = 16 << 20
"""Bytes that a process may print in one episode."""
KEPT_BYTES = 2000
"""Bytes of what a process printed last, for the reason of an abort."""
END_SECONDS = 2.0


class Pool:
    """Starts processes when they are needed, up to `Kind.processes`, and keeps them."""

    def __init__(self, kind: str, environment: Kind) -> None:
        """`kind` is the name that the process resolves again."""
        self._start = {"kind": kind, "settings": environment.model_dump(mode="json", exclude_unset=True)}
        self._kind = environment
        self._room = threading.Semaphore(environment.processes)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._is_closed = False

    async def play(self, order: Mapping[str, Any], seconds: float) -> Any:
        """Sends an order to a free process. A cancelled order ends its process."""
        turn = _Turn()
        try:
            return await in_thread(self.ask, order, seconds, turn)
        finally:
            turn.cancel()

    def ask(self, order: Mapping[str, Any], seconds: float, turn: _Turn | None = None) -> Any:
        """Waits for a free process, sends it an order, and returns the result.

        Raises `EnvironmentFailed` if the environment fails, and `ConfigError` for wrong settings or packages.
        """
        turn = turn or _Turn()
        with self._room:
            worker = self._worker(turn, str(order["model"]["base_url"]) if "model" in order else "")
            try:
                if worker.is_new:
                    _result(worker.ask(self._start, self._kind.start_seconds))
                answer = worker.ask(worker.inside(order), seconds)
            except BaseException:
                turn.finish()
                worker.end()
                raise
            if not (turn.finish() and self._keep(worker)):
                worker.end()
        return _result(answer)

    def _worker(self, turn: _Turn, model_url: str) -> Worker:
        """Returns an idle process, or a new one. In a sandbox it reaches this model only; "": nothing."""
        url = model_url if self._kind.sandbox else None
        with self._lock:
            if self._is_closed:
                raise EnvironmentFailed("the environment was closed: load it again")
            if turn.has_ended:
                raise EnvironmentFailed("the episode was cancelled")
            worker = self._idle.pop() if self._idle else None
        if worker is not None and (worker.has_ended or worker.model_url != url):
            worker.end()
            worker = None
        worker = worker or Worker(self._kind, url)
        if not turn.begin(worker):
            worker.end()
            raise EnvironmentFailed("the episode was cancelled")
        return worker

    def _keep(self, worker: Worker) -> bool:
        with self._lock:
            is_kept = not (self._kind.one_episode_a_process or self._is_closed)
            if is_kept:
                self._idle.append(worker)
            return is_kept

    def close(self) -> None:
        """Ends the processes that play no episode. The others end with their episode."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()
        for worker in idle:
            worker.end()


class _Turn:
    """The use of a process by one episode, which another thread may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self.has_ended = False

    def begin(self, worker: Worker) -> bool:
        """False if the episode was cancelled before."""
        with self._lock:
            self._worker = worker
            return not self.has_ended

    def finish(self) -> bool:
        """Gives the process back. False if the episode was cancelled, and its process killed."""
        with self._lock:
            is_in_use, self.has_ended = not self.has_ended, True
            return is_in_use

    def cancel(self) -> None:
        with self._lock:
            if not self.has_ended and self._worker is not None:
                self._worker.kill()
            self.has_ended = True


def _result(answer: Mapping[str, Any]) -> Any:
    if "error" in answer:
        raise (ConfigError if answer["wrong"] == "settings" else EnvironmentFailed)(answer["error"])
    return answer["result"]


def _buffered(orders: Any, answers: Any) -> tuple[BufferedWriter, BufferedReader]:
    return BufferedWriter(orders), BufferedReader(answers)


def sandbox_of(kind: Kind, model_url: str, folder: Path, variables: Mapping[str, str]) -> Sandbox:
    """The sandbox of a process. It sees `folder`, modules and what the kind names."""
    readable = []
    for path in map(Path, variables["PYTHONPATH"].split(os.pathsep)):
        with suppress(ConfigError):  # The present folder may be a home: modules there are not found.
            check_named("readable", path)
            readable.append(path)
    base = urlsplit(model_url).path
    return Sandbox(
        folder=folder,
        readable=(*readable, *kind.readable()),
        network="model" if model_url else "none",
        model_url=model_url,
        paths=(base, f"{base.removesuffix('/v1')}/k/"),
        limits=Limits(memory=kind.memory << 20, output=None),
        variables=variables,
    )


class Worker:
    """A process of the pool: `python -m agentjet.environments.worker`."""

    def __init__(self, kind: Kind, model_url: str | None) -> None:
        """With a `model_url` the process runs in a sandbox, whose only network is this model; "": no network."""
        self.is_new = True
        self.model_url = model_url
        self._folder = ProgramFolder(prefix="agentjet-env-")
        # The process runs in another folder, and finds the same modules: a kind may stand beside the caller's script.
        paths = [os.path.abspath(path) for path in sys.path if os.path.isdir(path or ".")]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "AGENTJET_CALLER": str(Path.cwd())}
        self._sandbox = None if model_url is None else sandbox_of(kind, model_url, Path(self._folder.name), variables)
        command = [sys.executable, "-P", "-m", "agentjet.environments.worker", str(kind.memory)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process: subprocess.Popen[bytes] | SandboxProcess
        if self._sandbox is not None:
            self._process = self._sandbox.start(command, **pipes)
        else:
            inherited = {name: value for name, value in os.environ.items() if name not in WITHHELD}
            self._process = subprocess.Popen(
                command, bufsize=0, cwd=self._folder.name, env=inherited | variables, start_new_session=True, **pipes
            )
        self._orders, self._answers = _buffered(self._process.stdin, self._process.stdout)
        self._printed = bytearray()
        self._num_printed = 0
        self._is_late = False
        self._reading = threading.Thread(target=self._read_prints, daemon=True)
        self._reading.start()

    def inside(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The order with the addresses of the model as the process sees them."""
        if self._sandbox is None:
            return dict(order)
        url = self._sandbox.inside_url
        seen = {
            name: {key: url(value) if isinstance(value, str) else value for key, value in order[name].items()}
            for name in ("model", "variables")
            if name in order
        }
        return {**order, **seen}

    def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Sends an order and waits for the answer. Raises `EnvironmentFailed` if the process ends, or is too slow."""
        self.is_new, self._num_printed = False, 0
        limit = threading.Timer(seconds, self._end_late)
        limit.daemon = True
        limit.start()
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
            line = self._answers.readline(MAX_ANSWER + 2)
        except OSError:  # It ended before it read the order.
            line = b""
        finally:
            limit.cancel()
            limit.join()
        if self._is_late:
            raise EnvironmentFailed(f"it did not end within {seconds:g} s and was ended")
        try:
            answer = json.loads(line)
            is_answer = bool(answer.keys() & {"result", "error"})
        except (ValueError, RecursionError, AttributeError):  # It ended, or the library wrote into this pipe.
            is_answer = False
        if is_answer and answer.get("wrong") != ENDED:
            return dict(answer)
        if is_answer:
            raise EnvironmentFailed(answer["error"])
        raise EnvironmentFailed(self._reason(bool(line)))

    def _end_late(self) -> None:
        self._is_late = True
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
            return
        self._process.kill()

    def _reason(self, has_answered: bool) -> str:
        if self._num_printed > MAX_PRINTED:
            return f"it printed more than {MAX_PRINTED >> 20} MiB in one episode and was ended: print less"
        if not has_answered:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._reading.join(END_SECONDS)
        printed = self._printed.decode(errors="replace").strip()
        code = self._process.returncode
        end = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        if isinstance(self._process, SandboxProcess) and self._process.exceeded:
            return f"it {self._process.exceeded}"
        last = f"it printed last: {printed}" if printed else "it printed nothing"
        if has_answered:
            return f"its process sent something else than an answer; {last}"
        return f"its process ended {end}; {last}"

    def _read_prints(self) -> None:
        assert self._process.stderr is not None
        while content := os.read(self._process.stderr.fileno(), 1 << 16):
            self._num_printed += len(content)
            self._printed += content
            del self._printed[:-KEPT_BYTES]
            if self._num_printed > MAX_PRINTED:
                self.kill()
                return

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Asks the outer process to end itself and every process below it. A sandbox ends at once."""
        if isinstance(self._process, SandboxProcess):
            self._process.kill()
        else:
            self._process.terminate()

    def end(self) -> None:
        """Ends the process and waits for its end."""
        self.kill()
        try:
            self._process.wait(KILL_SECONDS + END_SECONDS)
        except subprocess.TimeoutExpired:  # Something stopped it.
            self._process.kill()
            self._process.wait()
        self._reading.join(END_SECONDS)  # A process that it left may hold its output open.
        for pipe in (self._orders, self._answers, self._process.stderr):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._folder.cleanup()
