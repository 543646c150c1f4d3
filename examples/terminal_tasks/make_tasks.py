"""Writes tasks in Harbor's format: a folder of small files is put right with three commands.

    python -m examples.terminal_tasks.make_tasks terminal-tasks/tasks

The folders `train` and `held_out` have different names of files. The same call always writes the same tasks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_TRAINING, NUM_HELD_OUT = 400, 50
SEED = 2024
OURS = Path(__file__).with_name("tasks")
"""Three tasks that are in the repository, to look at."""

TRAINING_NAMES = """
    apple bell bird book bread chair city cloud coat corn desk door duck eagle farm fire fish flag frog gate glass gold
    grass hand hat hill house iron king lake lamp leaf lion map milk moon nest ocean paper pond rain ring river road
    rose salt sand ship shoe snow song spoon star stone sun table tiger train tree wall watch wind wolf wood
""".split()  # noqa: SIM905
HELD_OUT_NAMES = """
    arrow beach bottle bridge candle castle coin crown dream field flower garden hammer horse island key ladder letter
    market mirror needle orange pencil pillow rabbit ribbon saddle shadow silver string temple ticket tower valley
    window winter
""".split()  # noqa: SIM905
COLOURS = ("red", "blue", "green", "black", "white", "brown")
ANIMALS = ("zebra", "otter", "mouse", "heron", "camel", "bison", "raven", "sheep")


@dataclass(frozen=True)
class Step:
    """A thing to do with a file, and its command."""

    text: str
    command: str
    test: str
    """A shell test that is true once it is done."""


def steps(verb: str, name: str, other: str, colours: Sequence[str]) -> Step:
    """The step of a verb. `other` is the name of a new file."""
    file, new = f"{name}.txt", f"{other}.txt"
    old_colour, new_colour = colours
    return {
        "sort": Step(f"Sort the lines of {file}.", f"sort -o {file} {file}", f"sort -c {file}"),
        "rename": Step(f"Rename {file} to {new}.", f"mv {file} {new}", f"[ -e {new} ] && [ ! -e {file} ]"),
        "copy": Step(f"Copy {file} to {new}.", f"cp {file} {new}", f"[ -e {new} ] && [ -e {file} ]"),
        "delete": Step(f"Delete {file}.", f"rm {file}", f"[ ! -e {file} ]"),
        "replace": Step(
            f"Replace {old_colour} with {new_colour} in {file}.",
            f"sed -i s/{old_colour}/{new_colour}/ {file}",
            f"[ -e {file} ] && ! grep -q {old_colour} {file}",
        ),
    }[verb]


VERBS = ("sort", "rename", "copy", "delete", "replace")


@dataclass(frozen=True)
class Example:
    """A task: three steps on three files, and a fourth file that must stay as it is."""

    id: str
    verbs: tuple[str, ...]
    names: tuple[str, ...]
    others: tuple[str, ...]
    colours: tuple[str, str]
    order: int
    """Seed of the order of the commands."""

    def steps(self) -> list[Step]:
        return [steps(*parts, self.colours) for parts in zip(self.verbs, self.names, self.others, strict=False)]

    def commands(self) -> list[str]:
        """The right commands among wrong ones: the right verb on another file, another verb on the right file."""
        unused = [verb for verb in VERBS if verb not in self.verbs]
        wrong = [(verb, self.names[3], other) for verb, other in zip(self.verbs, self.others, strict=False)]
        wrong += [(verb, name, self.others[3]) for verb, name in zip(unused, self.names, strict=False)]
        commands = [step.command for step in (*self.steps(), *(steps(*parts, self.colours) for parts in wrong))]
        random.Random(self.order).shuffle(commands)
        return commands

    def files(self) -> dict[str, str]:
        """The files at the beginning."""
        old_colour, _ = self.colours
        animals = [ANIMALS[(self.order + number) % len(ANIMALS)] for number in range(4)]
        lines = sorted((f"{old_colour} {animal}" for animal in animals), reverse=True)
        return {f"{name}.txt": "\n".join(lines) + "\n" for name in self.names}


TASK_TOML = """\
schema_version = "1.4"

[metadata]
difficulty = "easy"
category = "files"

[metadata.agentjet]
commands = {commands}

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0

[environment]
memory_mb = 512
storage_mb = 64
network_mode = "no-network"
"""
DOCKERFILE = """\
FROM debian:12-slim
WORKDIR /app
COPY files/ .
"""
TEST = """\
#!/bin/bash
# A third for each thing that is done, and 1 only if all files are as they must be.
points=0
{tests}
reward=0.$((points * 33)) solved=0
if diff -r /app /tests/expected >/dev/null; then
  reward=1 solved=1
elif [ $points = 3 ]; then
  reward=0.66
fi
echo "{{\\"reward\\": $reward, \\"solved\\": $solved}}" > /logs/verifier/reward.json
echo "$points of 3 things are done"
"""


def write(example: Example, place: Path) -> None:
    """Writes a task folder."""
    folder = place / example.id
    files, steps = example.files(), example.steps()
    tests = "\n".join(f"{{ {step.test}; }} 2>/dev/null && points=$((points + 1))" for step in steps)
    contents = {
        "task.toml": TASK_TOML.format(commands=json.dumps(example.commands())),
        "instruction.md": "\n".join(step.text for step in steps) + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "solution/solve.sh": "#!/bin/bash\nset -e\n" + "".join(f"{step.command}\n" for step in steps),
        "tests/test.sh": TEST.format(tests=tests),
    }
    contents |= {f"environment/files/{name}": text for name, text in files.items()}
    contents |= {f"tests/expected/{name}": text for name, text in expected(example, files).items()}
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def expected(example: Example, files: dict[str, str]) -> dict[str, str]:
    """The files in the end."""
    end = dict(files)
    for verb, name, other in zip(example.verbs, example.names, example.others, strict=False):
        file, new = f"{name}.txt", f"{other}.txt"
        if verb == "sort":
            end[file] = "".join(sorted(end[file].splitlines(keepends=True)))
        elif verb == "copy":
            end[new] = end[file]
        elif verb == "rename":
            end[new] = end.pop(file)
        elif verb == "delete":
            del end[file]
        else:
            end[file] = end[file].replace(*example.colours)
    return end


def examples(names: Sequence[str], count: int, seed: int) -> Iterator[Example]:
    """Yields tasks with files of these names."""
    chance = random.Random(seed)
    triples = list(itertools.permutations(VERBS, 3))
    for number in range(count):
        verbs = chance.choice(triples)
        chosen = chance.sample(names, 8)
        old_colour, new_colour = chance.sample(COLOURS, 2)
        task_id = "-".join((*verbs, chosen[0], str(number)))
        order = chance.randrange(10**6)
        yield Example(task_id, verbs, tuple(chosen[:4]), tuple(chosen[4:]), (old_colour, new_colour), order)


def make(place: Path, num_training: int = NUM_TRAINING, num_held_out: int = NUM_HELD_OUT) -> None:
    """Writes the folders `train` and `held_out`, in place of what is there."""
    splits = {"train": (TRAINING_NAMES, num_training, SEED), "held_out": (HELD_OUT_NAMES, num_held_out, SEED + 1)}
    for split, arguments in splits.items():
        shutil.rmtree(place / split, ignore_errors=True)
        for example in examples(*arguments):
            write(example, place / split)


def make_ours(place: Path = OURS) -> None:
    """Writes the three tasks of the repository."""
    for example in itertools.islice(examples(HELD_OUT_NAMES, 3, SEED + 2), 3):
        write(example, place)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the folders train and held_out are written")
    make(parser.parse_args().folder)
