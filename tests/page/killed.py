"""A server that a test kills: prints its address and a code of a session as one line of JSON, then serves for ever.

python -m tests.page.killed DATA_DIR
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx

from tests.page.chromium import begin_a_batch
from tests.server.serving import VIEWER, serving


async def main(data_dir: Path) -> None:
    async with serving(data_dir) as served:
        for _ in range(3):
            await served.run.batch()
        await begin_a_batch(served.run)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {VIEWER}"}, trust_env=False) as http:
            answer = await http.post(f"{served.url}/swarm/v1/sessions", json={"role": "viewer"})
        print(json.dumps({"url": served.url, "code": answer.json()["code"]}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
