"""An agent of `docs/frameworks.md`: `python page_agent.py HEADING` runs the block below it and prints the reward."""

import asyncio
import inspect
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

if __name__ == "__main__":
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {sys.argv[1]}\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    path = Path("agent.py")  # a file, because frameworks read the source of their tools
    path.write_text(block, encoding="utf-8")
    sys.path.insert(0, "")
    from agent import agent

    episode = SimpleNamespace(
        base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], model=os.environ["OPENAI_MODEL"]
    )
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):  # the block may use the episode only
        del os.environ[variable]
    returned = agent(SimpleNamespace(id="17+25", payload=(17, 25)), episode)
    print(asyncio.run(returned) if inspect.isawaitable(returned) else returned)
