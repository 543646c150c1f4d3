"""Draws the pictures of the page: `python docs/site/screens.py FOLDER`, or `make screens`. Needs Chromium.

A server trains SmolLM2-135M on sums, with a fixed seed. A browser watches the Overview from the first batch on: its
frames become `demo.webp`. After `STEPS` batches every view is drawn, while training goes on. FOLDER has the data dir:
if it exists, the run continues, and only the views are drawn. One episode in 25 fails on purpose.

Then the runs of `broken.py` are trained and their Overview is drawn.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from broken import RUNS, broken, fails
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from agentjet import Episode, Reward, Swarm, Task
from agentjet.cli.look import page_address
from agentjet.cli.serve import ChildServer
from examples.arithmetic.agent import agent, held_out_tasks, training_tasks

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "screens"
SETTINGS = ROOT / "examples" / "arithmetic" / "job.toml"
JOB = {"batch_size": 8, "group_size": 8, "checkpoint_every": 10, "keep_checkpoints": 2, "seed": 7, "max_steps": 10_000}
STEPS = 12
"""Batches before the pictures."""
FRAME_SECONDS = 4.0
"""Time between two frames of the recording."""
MAX_FRAMES, SHOWN_MS = 50, 300
"""Frames of the recording, and the time for which each is shown."""
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SETTLE_MS = 1_500
"""Time for charts to be drawn after the answers have arrived."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", action="store_true", help="only train, on the server of AGENTJET_URL")
    arguments = parser.parse_args()
    if arguments.train:
        train()
    else:
        draw(arguments.folder.resolve())


def train() -> None:
    """Trains until it is interrupted."""
    with Swarm() as swarm:
        tasks = [replace(task, task_set=_task_set(task)) for task in training_tasks()]
        held_out = [replace(task, task_set=_task_set(task)) for task in held_out_tasks(24)]
        swarm.train(flaky, tasks, steps=JOB["max_steps"], concurrency=64, seed=7, eval_tasks=held_out, eval_every=5)


def _task_set(task: Task) -> str:
    return "one-digit" if max(task.payload) < 10 else "two-digit"


def flaky(task: Task, episode: Episode) -> Reward:
    """The agent of the example, whose tool fails in one episode of 25."""
    reward = agent(task, episode)
    if fails(episode, 0.04):
        raise TimeoutError("the calculator did not answer in 3 s")
    return reward


def draw(folder: Path) -> None:
    is_new = not (folder / "runs").exists()
    PICTURES.mkdir(exist_ok=True)
    overrides = [f"job.{name}={value}" for name, value in JOB.items()]
    with ChildServer(SETTINGS, overrides, folder) as server, server.connect() as swarm, browser() as chromium:
        trainer = subprocess.Popen(
            [sys.executable, __file__, str(folder), "--train"],
            env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "AGENTJET_URL": server.url, "PATH": "/usr/bin:/bin"}
            | {"AGENTJET_TOKEN": (folder / "token").read_text().strip()},
        )
        try:
            if is_new:
                record(chromium, swarm, PICTURES / "demo.webp")
            for name, view, options in views(swarm):
                picture(chromium, swarm, view, PICTURES / f"{name}.webp", **options)
        finally:
            trainer.terminate()
            trainer.wait()
        server.stop()
        draw_broken(chromium)


def draw_broken(chromium: Browser) -> None:
    """Draws the Overview of each broken run."""
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder, broken(run, Path(folder) / run.name) as swarm:
            picture(chromium, swarm, "", PICTURES / f"broken-{run.name}.webp")
            for rule in swarm.health().rules:
                print(f"{run.name}: {rule.level:5} {rule.name}: {rule.text}", flush=True)


@contextmanager
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("the pictures need Chromium on PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


def views(swarm: Swarm) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yields name, view and options of each picture, from the state of the run."""
    yield "overview", "", {}
    yield "overview-dark", "", {"dark": True}
    yield "overview-phone", "", {"viewport": NARROW}
    yield "episodes", "episodes", {}
    yield "failures", "episodes?status=aborted", {}
    batch = swarm.status().policy_version - 1
    yield "batches", "batches", {}
    yield "batch", f"batches/{batch}", {}
    trained = [one for one in swarm.episodes(500).episodes if one.trained_in is not None]
    two_turns = [one for one in trained if one.num_calls == 2 and one.reward] or trained
    yield "episode", f"episodes/{two_turns[0].episode_id}", {"keys": "3 l"}
    yield "group", f"groups/{two_turns[0].group_id}", {}
    yield "swarm", "swarm", {"role": "admin"}


def opened(chromium: Browser, swarm: Swarm, view: str, *, dark: bool, viewport: dict[str, int], role: str) -> Page:
    page = chromium.new_page(viewport=viewport, color_scheme="dark" if dark else "light", reduced_motion="reduce")
    page.goto(page_address(swarm, role, view))  # type: ignore[arg-type]
    page.wait_for_selector("main h1", timeout=60_000)
    page.wait_for_timeout(SETTLE_MS)
    return page


def picture(
    chromium: Browser,
    swarm: Swarm,
    view: str,
    path: Path,
    *,
    dark: bool = False,
    viewport: dict[str, int] = WIDE,
    role: str = "viewer",
    keys: str = "",
) -> None:
    page = opened(chromium, swarm, view, dark=dark, viewport=viewport, role=role)
    for key in keys.split():
        page.keyboard.press(key)
        page.wait_for_timeout(SETTLE_MS)
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, quality=82, method=6)
    page.close()
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def record(chromium: Browser, swarm: Swarm, path: Path) -> None:
    """Records the Overview until the run has learned `STEPS` batches."""
    page = opened(chromium, swarm, "", dark=False, viewport={"width": 960, "height": 640}, role="viewer")
    frames: list[Image.Image] = []
    while (version := swarm.status().policy_version) < STEPS:
        frame = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        if not frames or frame.tobytes() != frames[-1].tobytes():
            frames.append(frame)
            print(f"frame {len(frames)}, policy version {version}", flush=True)
        page.wait_for_timeout(FRAME_SECONDS * 1000)
    page.close()
    every = -(-len(frames) // MAX_FRAMES)
    first, *others = frames[-1::-every][::-1]
    first.save(path, save_all=True, append_images=others, duration=SHOWN_MS, loop=0, quality=60, method=4)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
