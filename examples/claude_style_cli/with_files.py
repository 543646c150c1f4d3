"""Runs a program in a folder that holds the files of its task:

    agentjet run ... -- python with_files.py PROGRAM ARGUMENTS...

`agentjet run` gives every episode an empty working directory and the task's row; `files` in it are names and contents.
"""

import json
import os
import sys
from pathlib import Path

if len(sys.argv) < 2 or "AGENTJET_TASK" not in os.environ:
    sys.exit("usage: agentjet run ... -- python with_files.py PROGRAM ARGUMENTS...")
for name, content in json.loads(os.environ["AGENTJET_TASK"])["files"].items():
    Path(name).write_text(content, encoding="utf-8")
os.execvp(sys.argv[1], sys.argv[1:])
