"""1. Nothing gets through of a table of attempts, as root and as a user. 2. Limits end a sandbox with their name.
3. A sandbox outlives the thread that asked for it, not its process. 4. The model is reached, and streams. 5. What is
wrong with a sandbox is named, with the way out."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import h11
import pytest

from agentjet import sandbox as package
from agentjet.client.command import CapturedProcess
from agentjet.errors import ConfigError
from agentjet.sandbox import Limits, ProgramFolder, Sandbox, attempts, usage
from agentjet.sandbox.check import FLAGS, reason_of
from agentjet.sandbox.filter import MACHINES, filter_program
from agentjet.sandbox.proxy import ModelProxy, _Connection, refusal
from agentjet.sandbox.sandbox import copy_public, etc_copy, hidden, programs
from tests.sandbox.attempts import ATTEMPTS, BARE, attempt_all

needed = pytest.mark.needs("bubblewrap")
QUICK = [name for name in ATTEMPTS if not name.startswith("usage") or "memory" in name][::4]
"""A quarter of the table. `python -m bench.environments --only sandbox` makes all attempts, as root and as a user."""


def run(sandbox: Sandbox, *command: str) -> CapturedProcess:
    process = CapturedProcess(command, sandbox=sandbox, stdin=subprocess.DEVNULL)
    process.wait()
    return process


# ---- attempts --------------------------------------------------------------------------------------------------------


@needed
def test_nothing_gets_through(tmp_path: Path) -> None:
    assert {name: got for name, got in attempt_all(tmp_path, QUICK).items() if got} == {}


@needed
@pytest.mark.thorough
def test_nothing_of_the_whole_table_gets_through(tmp_path: Path) -> None:
    assert {name: got for name, got in attempt_all(tmp_path, list(ATTEMPTS)).items() if got} == {}


def test_the_table() -> None:
    assert len(ATTEMPTS) >= 180 and set(BARE) <= ATTEMPTS.keys()
    for name, program in ATTEMPTS.items():
        compile(program, name, "exec")


@needed
def test_attempts_of_the_doctor() -> None:
    tried = attempts()
    assert len(tried) == 6 and not any(tried.values())


# ---- limits and ends -------------------------------------------------------------------------------------------------


@needed
@pytest.mark.parametrize(
    ("limits", "program", "reason"),
    [
        (Limits(wall_seconds=0.5), "sleep 60", "ran longer than 0.5 s"),
        (Limits(cpu_seconds=0.3), "while :; do :; done", "used more than 0.3 s of CPU time"),
        (
            Limits(disk=2**20),
            "for i in 1 2 3 4 5; do head -c 999999 /dev/zero > $i; done; sleep 60",
            "wrote more than 1 ",
        ),
        (Limits(output=2**20), "yes", "printed more than 1 MiB to stdout"),
        (Limits(output=2**20), "yes >&2", "printed more than 1 MiB to stderr"),
        (
            Limits(memory=2**26),
            "for i in 1 2 3 4; do head -c 40000000 /dev/zero | tail & done; sleep 60",
            "used more than 64 MiB of memory",
        ),
        (Limits(disk=2**20), "mkdir d; chmod 300 d; sleep 60", ""),
    ],
)
def test_a_limit_ends_the_program(limits: Limits, program: str, reason: str, tmp_path: Path) -> None:
    if not reason and os.getuid() == 0:
        pytest.skip("root reads every folder")
    found = run(Sandbox(folder=tmp_path, limits=limits), "sh", "-c", program).excess
    assert (reason or "cannot be read") in found and "was ended" in found


@needed
def test_processes_are_limited(tmp_path: Path) -> None:
    program = "import os, time\nn = 0\nwhile n < 99:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\n"
    process = run(Sandbox(folder=tmp_path, limits=Limits(processes=10)), sys.executable, "-c", program)
    assert "BlockingIOError" in process.text("stderr")


@needed
def test_memory_is_limited_without_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.sandbox.usage.Cgroup.make", classmethod(lambda cls, memory: None))
    many = "for i in 1 2 3 4; do head -c 40000000 /dev/zero | tail & done; sleep 60"
    sandbox = Sandbox(folder=tmp_path, limits=Limits(memory=2**26))
    assert "64 MiB of memory" in run(sandbox, "sh", "-c", many).excess
    hidden_memory = "import os; os.memfd_create('x')"
    assert "not implemented" in run(sandbox, sys.executable, "-c", hidden_memory).text("stderr")


def test_cgroups_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, own = tmp_path / f"{usage.NAME}{2**22 + 1}-0", tmp_path / f"{usage.NAME}{os.getpid()}-0"
    for folder in (left, own):
        folder.mkdir()
    monkeypatch.setattr(usage, "places", lambda: [(2, {"memory": tmp_path})])
    usage.remove_left.cache_clear()
    usage.remove_left(os.getpid())
    assert own.exists() and not left.exists()


@needed
def test_what_it_wrote_belongs_to_the_caller(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("1")
    program = "echo 2 > given; mkdir -p a/b; echo 3 > a/b/c; chmod 4777 given; ln -s /etc/passwd l; cd /tmp; id -u"
    process = run(Sandbox(folder=tmp_path), "sh", "-c", program)
    uid = int(process.text())
    assert uid and (uid == os.getuid() or os.getuid() == 0)
    for path in (tmp_path, *tmp_path.rglob("*")):
        assert path.lstat().st_uid == os.getuid()
    assert os.getuid() or not (tmp_path / "given").stat().st_mode & 0o6000


@needed
def test_a_deep_folder_is_removed(tmp_path: Path) -> None:
    """`TemporaryDirectory` raised a RecursionError, and the episode was lost."""
    program = "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')"
    with ProgramFolder(dir=tmp_path) as place:
        run(Sandbox(folder=Path(place)), sys.executable, "-c", program)
    assert list(tmp_path.iterdir()) == []


@needed
def test_it_sees_only_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    folder, other = tmp_path / "work", tmp_path / "other"
    (other / "data" / "runs" / "default").mkdir(parents=True)
    (other / "data" / "token").write_text("secret")
    folder.mkdir()
    sandbox = Sandbox(folder=folder, readable=(other,), variables={"A": "1"})
    process = run(sandbox, "sh", "-c", f"ls -d /* {tmp_path}/*; cat {other}/data/token; env")
    lines = process.text().splitlines()
    assert not {"/root", "/home", "/var", "/run", "/sys"}.intersection(lines) - {"/root", "/home"}
    assert {str(folder), str(other), "A=1", f"HOME={folder}"} <= set(lines)
    assert not [line for line in lines if "SECRET" in line or "secret" in line]


def test_the_copy_of_etc_has_no_file_that_others_may_not_read(tmp_path: Path) -> None:
    """Fedora has private keys below /etc/pki. Root can read them, and the copies are for all."""
    source = tmp_path / "pki"
    (source / "private").mkdir(parents=True)
    for name, mode in (("open", 0o644), ("key", 0o600), ("private/key", 0o644)):
        (source / name).write_text("1")
        (source / name).chmod(mode)
    (source / "private").chmod(0o700)
    (source / "link").symlink_to("key")
    copy_public(source, tmp_path / "copy")
    copy_public(source / "key", tmp_path / "key")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["link", "open"]
    assert not (tmp_path / "key").exists()


def test_the_copy_of_etc_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd removes old files of /tmp, and a container with the same /tmp does not see the owner's process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("agentjet.sandbox.sandbox.ETC", ("hosts",))
    monkeypatch.setattr("atexit.register", lambda function: None)
    of_other_container, left = etc_copy(2**22 + 1), tmp_path / f"agentjet-sandbox-etc-{2**22 + 2}-x"
    left.mkdir()
    etc_copy(os.getpid())
    assert of_other_container.exists() and not left.exists()


@needed
def test_it_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    started = []
    asking = threading.Thread(target=lambda: started.append(Sandbox(folder=tmp_path).start(["sleep", "1"])))
    asking.start()
    asking.join()
    assert started[0].poll() is None and started[0].wait() == 0


@needed
def test_it_ends_with_its_process(tmp_path: Path) -> None:
    seconds = f"60.{os.getpid()}"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom agentjet.sandbox import Sandbox\n"
        "process = Sandbox(folder=Path(sys.argv[1])).start(['sleep', sys.argv[2]])\nprint(flush=True)\ntime.sleep(60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), seconds], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    caller.stdout.readline()
    assert await_count(seconds, 1)
    os.kill(caller.pid, signal.SIGKILL)
    caller.communicate()
    assert await_count(seconds, 0)


def await_count(seconds: str, count: int) -> bool:
    """Waits until so many processes `sleep SECONDS` run."""
    wanted = f"sleep\0{seconds}\0".encode()
    for _ in range(500):
        found = 0
        for place in Path("/proc").iterdir():
            try:
                found += place.name.isdecimal() and (place / "cmdline").read_bytes() == wanted
            except OSError:
                continue
        if found == count:
            return True
        time.sleep(0.02)
    return False


@needed
def test_a_signal_reaches_the_program(tmp_path: Path) -> None:
    process = Sandbox(folder=tmp_path).start(
        ["sh", "-c", "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == b"up\n"
    process.send_signal(signal.SIGTERM)
    with process.stdout as output:
        assert b"bye" in output.read()
    assert process.wait() == 3


@needed
@pytest.mark.anyio
async def test_a_coroutine_talks_to_it(tmp_path: Path) -> None:
    process = await Sandbox(folder=tmp_path).start_async(["cat"], limit=2**20)
    process.stdin.write(b"one\n")
    await process.stdin.drain()
    assert await process.stdout.readline() == b"one\n"
    process.stdin.close()
    assert await process.wait() == 0 and await process.stderr.read() == b""


# ---- the model -------------------------------------------------------------------------------------------------------

CLIENT = """
import os, sys, urllib.request
answer = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/stream")
print(answer.read(7), flush=True)
sys.stdin.readline() or answer.close()
print(answer.read() if len(sys.argv) > 1 else "closed", flush=True)
"""


@needed
@pytest.mark.anyio
@pytest.mark.parametrize("hangs_up", [False, True])
async def test_an_answer_streams_and_a_hang_up_reaches_the_server(hangs_up: bool, tmp_path: Path) -> None:
    go, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1:")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\ndata: 1\r\n")
        await writer.drain()
        if hangs_up:
            assert await reader.read() == b""
            gone.set()
        else:
            await go.wait()
            writer.write(b"7\r\ndata: 2\r\n0\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    sandbox = Sandbox(folder=tmp_path, network="model", model_url=url, variables={"OPENAI_BASE_URL": url})
    process = await sandbox.start_async([sys.executable, "-c", CLIENT, *([] if hangs_up else ["all"])], limit=2**20)
    assert await process.stdout.readline() == b"b'data: 1'\n"
    if hangs_up:
        process.kill()
        await asyncio.wait_for(gone.wait(), 20)
    else:
        process.stdin.write(b"go on\n")
        go.set()
        assert await process.stdout.readline() == b"b'data: 2'\n"
    await process.wait()
    server.close()


@pytest.mark.parametrize(
    ("target", "method", "allowed", "gets_through"),
    [
        (b"/v1/models", b"GET", ("/v1",), True),
        (b"/v1", b"POST", ("/v1",), True),
        (b"/v1?x=/../y", b"GET", ("/v1",), True),
        (b"/v1/models/org%2Fname", b"GET", ("/v1",), True),
        (b"/anything", b"GET", ("/",), True),
        (b"/runs/a/v1/x", b"GET", ("/runs/a/v1",), True),
        (b"/runs/b/v1/x", b"GET", ("/runs/a/v1",), False),
        (b"/v1/../x", b"GET", ("/",), False),
        (b"/v1/%2e%2E/x", b"GET", ("/v1",), False),
        (b"/v1/%252e%252e/x", b"GET", ("/v1",), False),
        (b"/v1/.%2e;a/x", b"GET", ("/v1",), False),
        (b"/v1\\..\\x", b"GET", ("/v1",), False),
        (b"/v10", b"GET", ("/v1",), False),
        (b"//v1", b"GET", ("/v1",), False),
        (b"/v1/%0d%0aX", b"GET", ("/v1",), False),
        (b"http://a/v1", b"GET", ("/",), False),
        (b"*", b"OPTIONS", ("/",), False),
        (b"a:1", b"CONNECT", ("/",), False),
    ],
)
def test_what_the_proxy_forwards(target: bytes, method: bytes, allowed: tuple[str, ...], gets_through: bool) -> None:
    assert (refusal(target, method, [], allowed) == "") is gets_through


@pytest.mark.anyio
async def test_each_chunk_is_one_turn_of_the_loop() -> None:
    """The watch of all sandboxes runs between two chunks: else one program delays the limits of all others."""
    reader, writer = await asyncio.open_connection(sock=(pair := socket.socketpair())[0])
    connection = _Connection(ModelProxy("http://127.0.0.1:9/v1", ("/v1",)), reader, writer)
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader.feed_data(head + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n")

    async def read() -> int:
        num_events = 1
        while not isinstance(await connection._received(), h11.EndOfMessage):
            num_events += 1
        return num_events

    reading, num_turns = asyncio.create_task(read()), 0
    while not reading.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= reading.result() == 1002
    writer.close()
    pair[1].close()


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "settings", "is_root", "in_container", "message"),
    [
        ("", {}, False, False, "need bubblewrap, which is not installed: apt-get install bubblewrap"),
        ("bubblewrap 0.4.0", {}, False, False, "bubblewrap 0.8, and bubblewrap 0.4.0 is installed"),
        (
            "bubblewrap 0.8.0",
            {"kernel.unprivileged_userns_clone": "0"},
            False,
            False,
            "sysctl -w kernel.unpriv.*_clone=1",
        ),
        (
            "bubblewrap 0.9.0",
            {"kernel.apparmor_restrict_unprivileged_userns": "1"},
            False,
            False,
            "kernel.apparmor_restrict_unprivileged_userns = 1 forbids user namespaces: sudo sysctl -w .*=0",
        ),
        ("bubblewrap 0.8.0", {"user.max_user_namespaces": "0"}, False, True, "sysctl -w user.max_user_namespaces="),
        ("bubblewrap 0.8.0", {"user.max_user_namespaces": "9"}, False, True, FLAGS),
        ("bubblewrap 0.8.0", {"user.max_user_namespaces": "0"}, True, False, FLAGS),
        ("bubblewrap 0.8.0", {}, False, False, "check that unprivileged user namespaces are allowed"),
    ],
)
def test_why_there_is_no_sandbox(
    version: str, settings: dict[str, str], is_root: bool, in_container: bool, message: str
) -> None:
    found = reason_of(version, "bwrap: No permissions", settings, is_root=is_root, in_container=in_container)
    assert re.search(message, found)


def test_without_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package.missing.cache_clear()
    try:
        with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
            Sandbox(folder=tmp_path).start(["true"])
    finally:
        package.missing.cache_clear()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folder": Path("/nowhere")}, "folder /nowhere: no such file or folder"),
        ({"folder": Path.home()}, "the home folder .*: name a folder in it"),
        ({"folder": Path("/")}, "is or holds /"),
        ({"readable": (Path("/tmp"),)}, "readable /tmp is or holds /tmp, with files of others"),
        ({"readable": (Path("/etc/passwd"),)}, "lies in /etc, which a sandbox does not show"),
        ({"readable": (Path("/proc/self"),)}, "/proc"),
        ({"readable": (Path("/usr/../var"),)}, "is or holds /var"),
        ({"writable": (Path(__file__),)}, "is not a folder"),
        ({"network": "model"}, "model_url = '': network = 'model' needs the http or https URL"),
        ({"network": "all"}, "network = 'all': expected none, model or open"),
    ],
)
def test_what_may_not_be_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Sandbox(folder=tmp_path), **changes).check()


def test_a_link_to_the_home_is_the_home(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path.home())
    with pytest.raises(ConfigError, match="the home folder"):
        Sandbox(folder=tmp_path, readable=(tmp_path / "link",)).check()


def test_a_folder_that_only_root_reads(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    sandbox = Sandbox(folder=tmp_path, readable=(tmp_path / "closed",))
    if os.getuid():
        sandbox.check()
    else:
        with pytest.raises(ConfigError, match=r"readable by its owner only \(mode 700\).*: chmod o\+rX"):
            sandbox.check()


@pytest.mark.parametrize("changes", [{"memory": 0}, {"memory": 2**63}, {"cpu_seconds": -1.0}, {"processes": 0}])
def test_a_limit_that_is_no_limit(changes: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=f"limit {next(iter(changes))} = .*: give a number above 0 and below 2\\*\\*63, or None"
    ):
        Limits(**changes)  # type: ignore[arg-type]


@needed
def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    process = run(Sandbox(folder=tmp_path), "no-such-program")
    assert "no-such-program could not be started in the sandbox" in process.text("stderr")


def test_programs_with_their_installation(tmp_path: Path) -> None:
    place = tmp_path / "node" / "bin"
    (tmp_path / "node" / "lib").mkdir(parents=True)
    place.mkdir()
    (place / "node").write_text("#!/bin/sh\n")
    (place / "node").chmod(0o755)
    assert tmp_path / "node" in programs(str(place / "node"))
    assert programs("no-such-program") == () and programs("/usr/bin/env") == ()


def test_data_dirs_and_sockets_are_hidden(tmp_path: Path) -> None:
    (tmp_path / "a" / "data" / "runs" / "default").mkdir(parents=True)
    assert list(hidden([tmp_path])) == [tmp_path / "a" / "data"]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_is_a_program(machine: str) -> None:
    for deny_unmapped in (False, True):
        program = filter_program(deny_unmapped=deny_unmapped, machine=machine)
        assert len(program) % 8 == 0 and len(program) // 8 < 256
    assert filter_program(deny_unmapped=False, machine="other") == b""
