"""Write three small corpora to try `pyscan scan` with: sums worked out, short functions, and plain prose.

Everything is put together here from parts written for this file, with a fixed seed; the files in examples/corpora are
what it writes.

    python examples/make_corpora.py examples/corpora
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

NUM_SEQUENCES = 80


def arithmetic(chance: random.Random) -> str:
    """A few lines of sums with their results."""
    lines = []
    for _ in range(chance.randint(4, 8)):
        a, b, c = chance.randint(2, 99), chance.randint(2, 99), chance.randint(2, 12)
        lines.append(
            chance.choice(
                [
                    f"{a} + {b} = {a + b}",
                    f"{a + b} - {b} = {a}",
                    f"{a} * {c} = {a * c}",
                    f"({a} + {b}) * {c} = {a + b} * {c} = {(a + b) * c}",
                    f"{a * c} / {c} = {a}",
                    f"{a * c} - {c} * {a} = {a * c} - {a * c} = 0",
                ]
            )
        )
    return "\n".join(lines)


NOUNS = ["row", "node", "price", "word", "point", "job", "file", "score", "edge", "token", "item", "page"]
FUNCTIONS = """
def {verb}_{noun}s({noun}s):
    total = 0
    for {noun} in {noun}s:
        total += {noun}.{field}
    return total
---
def {verb}_{noun}({noun}, limit={n}):
    if {noun}.{field} > limit:
        raise ValueError('the {field} has a limit')
    return {noun}
---
class {Noun}:
    def __init__(self, {field}, parent=None):
        self.{field} = {field}
        self.parent = parent

    def {verb}(self):
        return self.{field} * {n}
---
{noun}s = [{noun} for {noun} in load('{field}') if {noun}.{field} >= {n}]
{noun}s.sort(key=lambda {noun}: {noun}.{field})
print(len({noun}s), {noun}s[:{m}])
---
def {verb}_all({noun}s):
    seen = set()
    while {noun}s:
        {noun} = {noun}s.pop()
        if {noun}.{field} in seen:
            continue
        seen.add({noun}.{field})
        yield {noun}
---
with open(path) as file:
    for number, line in enumerate(file, {m}):
        {field}, _, rest = line.partition('=')
        if not rest:
            print(number, {field})
"""


def code(chance: random.Random) -> str:
    """A function, a class or a loop with names of its own."""
    noun = chance.choice(NOUNS)
    words = {"noun": noun, "Noun": noun.title(), "n": chance.randint(2, 500), "m": chance.randint(1, 9)}
    words["verb"] = chance.choice(["count", "check", "merge", "visit", "load", "scale", "parse", "sum"])
    words["field"] = chance.choice(["name", "size", "weight", "depth", "cost", "key", "width", "state"])
    return chance.choice(FUNCTIONS.strip().split("\n---\n")).format(**words)


PEOPLE = [
    "The miller",
    "An old sailor",
    "Her younger brother",
    "The teacher",
    "A traveller",
    "The gardener",
    "My neighbour",
]
DEEDS = [
    "walked down to the river before sunrise",
    "had not spoken about the letter for years",
    "kept a small brass lamp beside the window",
    "knew every path across the northern hills",
    "waited for the rain to stop",
    "carried the last basket of apples home",
    "listened to the wind in the empty barn",
]
TURNS = [
    "Nobody in the village thought much of it",
    "The road was longer than anyone remembered",
    "It was the kind of evening that asks for silence",
    "Snow had covered the fences during the night",
    "A dog barked somewhere behind the church",
    "The harvest had been poor, and winter came early",
]
ENDS = [
    "and so the matter was settled without a word.",
    "but the light in the kitchen stayed on until morning.",
    "while the children slept and dreamed of the sea.",
    "and for once there was nothing left to mend.",
    "though a little doubt remained, as it always does.",
]


def prose(chance: random.Random) -> str:
    """Two or three sentences of a story."""
    first = f"{chance.choice(PEOPLE)} {chance.choice(DEEDS)}."
    second = f"{chance.choice(TURNS)}, {chance.choice(ENDS)}"
    third = f" {chance.choice(PEOPLE)} {chance.choice(DEEDS)}, {chance.choice(ENDS)}" if chance.random() < 0.5 else ""
    return f"{first} {second}{third}"


TOPICS: dict[str, Callable[[random.Random], str]] = {"arithmetic": arithmetic, "code": code, "prose": prose}


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in TOPICS.items():
        chance = random.Random(f"corpus of {name}")
        lines = [json.dumps({"text": make(chance)}) + "\n" for _ in range(NUM_SEQUENCES)]
        (directory / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/corpora"))
