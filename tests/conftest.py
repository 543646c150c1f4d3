"""What holds for every test: one thread each, and no network beyond loopback.

The environment is set before anything imports NumPy or torch, which read it once; server processes that a test starts
inherit it.
"""

from __future__ import annotations

import os

from hypothesis import settings

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

# Of tests that set no number of their own. `--hypothesis-profile=thorough` takes about half an hour of one core.
settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=2_000, deadline=None)
settings.load_profile("default")
