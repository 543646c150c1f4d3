"""The server of the long run, as a process: `python -m bench.face.serve DATA_DIR`.

All of `agentjet serve` except the worker: uvicorn on loopback, keys, page, renderer, trees, journal on disk. Prints its
address when it is ready, and ends on SIGTERM. Adds `GET /cpu`, the CPU seconds of the process, and `GET /empty`, a page
without a script.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvicorn
from starlette.responses import HTMLResponse

from agentjet.config import ServeConfig
from agentjet.gateway.runs import Runs
from agentjet.server import Keys, create_app
from agentjet.server.http import listen, tune_python, uvicorn_config
from bench.face import history
from tests.fakes import ScriptedCompute, make_model_info, saying

ANSWER = "Look at row 42 next"
EMPTY = "<!doctype html><html lang=en><title>Empty</title><p>Empty"


async def serve(data_dir: Path) -> None:
    card = make_model_info(data_dir.parent / "tokenizer")
    job = history.job().model_dump(mode="json")
    config = ServeConfig.model_validate({"model": {"name": card.name}, "server": {"data_dir": data_dir}, "job": job})
    runs = Runs(config, ScriptedCompute(card, saying(lambda prompt: ANSWER), piece=64))
    app = create_app(runs, Keys.open(data_dir))
    app.add_api_route("/cpu", lambda: time.process_time())
    app.add_api_route("/empty", lambda: HTMLResponse(EMPTY))
    with listen("127.0.0.1", 0, backlog=4096) as listener:
        await runs.start()
        await runs.default.engine.wait_until_up()
        tune_python()
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(uvicorn_config(app, config.server)).serve([listener])
    await runs.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
