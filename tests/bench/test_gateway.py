"""`bench.gateway` measures what it says.

1. Answers are read whole, however the bytes arrive, and checked.
2. The script's own time is no overhead, and percentiles are of all calls.
3. The verdict's ratio is to a peer that ran; errors of every part count.
4. The whole bench, small: every call answered, plain and streamed, by a real gateway process; memory and commits told.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from bench.gateway import summarise
from bench.gatewaying.backend import EVENTS, WHOLE
from bench.gatewaying.load import Tally, WrongAnswer, answered, streamed
from bench.gatewaying.load import summarise as summarise_load
from bench.gatewaying.report import Load, Outcome, percentile
from bench.gatewaying.scripted import ANSWER
from bench.gatewaying.wire import BrokenConnection, Connection, Reply, dechunked

LOAD = Load(url="http://127.0.0.1:1", token="t", model="m", episodes=2, calls=2, seconds=0.5)


def chunked(parts: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def outcome(**changes: float | str) -> Outcome:
    zero = dict.fromkeys(("calls", "errors", "seconds", "rps", "p50_ms", "p99_ms", "plain_p50_ms"), 0.0)
    zero |= dict.fromkeys(("stream_p50_ms", "lag_p99_ms", "generator_cpu"), 0.0)
    return Outcome(**{**zero, "first_error": "", **changes})  # type: ignore[arg-type]


async def replies(raw: bytes, step: int, *, times: int = 1) -> list[Reply]:
    """What the client makes of a server that sends `raw` in pieces of `step` bytes to every request."""

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            while (line := await reader.readline()) != b"\r\n":
                assert line.endswith(b"\r\n")
            await reader.readexactly(4)
            for at in range(0, len(raw), step):
                writer.write(raw[at : at + step])
                await writer.drain()
                await asyncio.sleep(0)
            if not raw:
                break
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = Connection(f"http://127.0.0.1:{port}")
    try:
        return [await connection.request("POST", "/", "t", b"body") for _ in range(times)]
    finally:
        connection.close()
        await ended.wait()
        server.close()


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_answers_are_read_whole(step: int) -> None:
    one, two = asyncio.run(replies(plain(WHOLE), step, times=2))
    assert answered(one) == answered(two) == ANSWER
    assert one.sent <= one.done <= two.sent
    [streaming] = asyncio.run(replies(chunked(EVENTS), step))
    assert streaming.body == b"".join(EVENTS)
    assert streamed(streaming) == ANSWER


def test_a_connection_closed_under_a_request_is_told() -> None:
    with pytest.raises(BrokenConnection):
        asyncio.run(replies(b"", 1))


def test_a_chunk_may_hold_what_ends_a_body() -> None:
    assert dechunked(b"7\r\n0\r\n\r\nab\r\n1\r\nc\r\n0\r\n\r\n") == b"0\r\n\r\nabc"


def test_half_a_stream_is_an_error() -> None:
    with pytest.raises(WrongAnswer, match="without its end"):
        streamed(Reply(200, b"".join(EVENTS[:-1]), 0.0, 0.0))
    with pytest.raises(WrongAnswer, match="503"):
        streamed(Reply(503, b"busy", 0.0, 0.0))
    with pytest.raises(WrongAnswer, match="503"):
        answered(Reply(503, b"busy", 0.0, 0.0))


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(1, 201)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (100.0, 198.0, 200.0)
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) == 0.0


def test_the_scripts_own_time_is_no_overhead() -> None:
    tally = Tally(plain=[0.51, 0.52], stream=[0.53], errors=["Broken: x"])
    found = summarise_load(LOAD, tally, seconds=2.0, cpu=0.5)
    assert (found.calls, found.errors, found.first_error) == (3, 1, "Broken: x")
    assert found.rps == 1.5
    assert (found.p50_ms, found.p99_ms, found.stream_p50_ms) == pytest.approx((20.0, 30.0, 30.0))
    assert found.generator_cpu == 0.25


def test_the_ratio_is_to_a_peer_that_ran() -> None:
    ours = (outcome(rps=300.0, errors=1), outcome(p50_ms=4.0, errors=1), outcome(p50_ms=3.0), outcome(p50_ms=2.0))
    verdict = summarise(*ours, outcome(rps=60.0, errors=2))
    assert (verdict["ratio"], verdict["litellm_rps"], verdict["errors"]) == (5.0, 60.0, 4)
    assert (verdict["p50_ms"], verdict["p50_ms_without_fsync"], verdict["p50_ms_awake"]) == (4.0, 3.0, 2.0)
    alone = summarise(*ours, "not installed")
    assert (alone["ratio"], alone["without_peer"], alone["errors"]) == (None, "not installed", 2)


@pytest.mark.e2e
@pytest.mark.thorough
def test_the_whole_bench_small() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.gateway", "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["errors"] == 0
    assert verdict["litellm_rps"] is None
    assert verdict["kb_per_episode"] > 0
    for measured in verdict["outcomes"].values():
        assert measured["calls"] == 60
        assert measured["plain_p50_ms"] != 0 and measured["stream_p50_ms"] != 0
        assert 0 < measured["commits"] <= 60
