"""Reading, tokenising and batching a corpus, and the file of its scan: what needs no model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from pyscan import codecs, corpus
from pyscan.check import check
from pyscan.corpus import Record
from pyscan.corpus_file import CorpusFile, check_world, troubles
from pyscan.corpus_norms import Measured
from pyscan.corpus_plan import windows
from pyscan.corpus_tokens import CorpusError, Encoder, Sequence
from pyscan.ranks import rank_path
from pyscan.schema import Channel, Schema
from tests.corpus_cases import texts, write_lines
from tests.make_scan import Builder, make_rows, site

# Reading


def test_bad_lines_are_named_with_file_and_line_and_have_no_number(tmp_path: Path) -> None:
    good = {"text": "a"}
    first = write_lines(
        tmp_path / "a.jsonl", good, ["list"], {"prompt": "p"}, {"text": 7}, {"messages": [{}]}, {"x": 1}
    )
    second = tmp_path / "b.jsonl"
    second.write_bytes(b'\n{"text": "b"}\n{"text": \n{"text": "\xff"}\n   \n{"prompt": "p", "response": "r"}')
    found = corpus.survey([first, second])
    assert found.num_records == 3
    assert [(Path(bad.source).name, bad.line) for bad in found.bad] == [
        *(("a.jsonl", line) for line in (2, 3, 4, 5, 6)),
        *(("b.jsonl", line) for line in (3, 4)),
    ]
    assert "got list" in found.bad[0].reason
    assert "--generate" in found.bad[1].reason
    assert "text must be text, got int" in found.bad[2].reason
    assert "it has x" in found.bad[4].reason
    assert [(r.number, r.line) for r in corpus.records([first, second])] == [(1, 1), (2, 2), (3, 6)]
    assert corpus.survey([first], generate=True).num_records == 2, "a prompt alone can be answered"


def test_the_mark_of_a_corpus_changes_with_its_bytes_and_their_place(tmp_path: Path) -> None:
    one, two = texts(tmp_path / "1", "a", "b"), texts(tmp_path / "2", "c")
    mark = corpus.survey([one, two]).fingerprint
    assert corpus.survey([one, two]).fingerprint == mark
    assert corpus.survey([two, one]).fingerprint != mark
    moved = corpus.survey([texts(tmp_path / "3", "a"), texts(tmp_path / "4", "b", "c")])
    assert moved.fingerprint != mark


# Tokenising


class Letters:
    """A tokenizer with a token per character, a begin token, and a chat template."""

    bos_token_id = 1

    def __init__(self, template: Any = None) -> None:
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        made: str = self.chat_template(messages, add_generation_prompt)
        return made


def template(messages: list[dict[str, str]], prompt: bool) -> str:
    return "".join(f"<{m['role'][0]}>{m['content']};" for m in messages) + "<a>" * prompt


def encoded(body: dict[str, Any], *, chat: Any = None, **options: Any) -> Sequence:
    settings = {"loss": "response", "max_length": None} | options
    return Encoder(Letters(chat), **settings).encode(Record(1, "f", 1, body))


def shown(sequence: Sequence) -> str:
    """The tokens as text, targets in capitals; ^ is the begin token."""
    pairs = zip(sequence.ids, sequence.is_target, strict=True)
    return "".join(("^" if i == 1 else chr(i).upper() if target else chr(i)) for i, target in pairs)


CHAT = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "ab"), ("user", "r"), ("assistant", "c"))]


@pytest.mark.parametrize(
    ("body", "options", "want"),
    [
        ({"text": "abc"}, {}, "^ABC"),
        ({"text": ""}, {}, "^"),
        ({"prompt": "ab", "response": "cd"}, {}, "^abCD"),
        ({"prompt": "ab", "response": "cd"}, {"loss": "all"}, "^ABCD"),
        ({"prompt": "ab", "response": ""}, {}, "^ab"),
        ({"prompt": "ab", "response": "cd"}, {"max_length": 4}, "^abC"),
        ({"prompt": "abcdef", "response": "x"}, {"generate": 2, "max_length": 5}, "def"),
        ({"text": "abc"}, {"generate": 2}, "^ABC"),
        ({"messages": CHAT}, {"chat": template}, "<u>q;<a>AB;<u>r;<a>C;"),
        ({"messages": CHAT}, {"chat": template, "loss": "all"}, "<U>Q;<A>AB;<U>R;<A>C;"),
        ({"messages": CHAT}, {"chat": template, "generate": 3}, "<u>q;<a>AB;<u>r;<a>"),
    ],
)
def test_the_tokens_that_carry_loss(body: dict[str, Any], options: dict[str, Any], want: str) -> None:
    assert shown(encoded(body, **options)) == want


def test_what_was_generated_carries_the_loss() -> None:
    prompt = encoded({"prompt": "ab"}, generate=2)
    assert shown(prompt.answered((ord("c"), ord("d")), "cd", loss="response")) == "^abCD"
    assert shown(prompt.answered((ord("c"),), "c", loss="all")) == "^ABC"
    assert prompt.answered((ord("c"),), "c", loss="all").text == "abc"


def test_chats_that_cannot_be_told_apart_are_refused_with_their_place() -> None:
    with pytest.raises(CorpusError, match="f:1 has messages, and the tokenizer has no chat template"):
        encoded({"messages": CHAT})

    def forgetful(messages: list[dict[str, str]], prompt: bool) -> str:
        return template(messages[-2:], prompt)

    with pytest.raises(CorpusError, match="f:1: the chat template rewrites earlier turns"):
        encoded({"messages": CHAT}, chat=forgetful)
    assert encoded({"messages": CHAT}, chat=forgetful, loss="all").num_targets > 0


# Batching


@pytest.mark.parametrize("batch_tokens", [1, 16, 100, 5000])
@pytest.mark.parametrize("count", [0, 1, 63, 1000])
def test_every_item_is_in_one_batch_that_keeps_to_its_size(count: int, batch_tokens: int) -> None:
    lengths = np.random.default_rng(count).integers(0, 40, count).tolist()
    items = list(enumerate(lengths))
    found = list(windows(items, cost=lambda item: item[1], batch_tokens=batch_tokens))
    batches = [batch for window in found for batch in window]
    assert sorted(item for batch in batches for item in batch.members) == items
    assert [batch.number for batch in batches] == list(range(len(batches)))
    for batch in batches:
        assert len(batch.members) == 1 or len(batch.members) * max(n for _, n in batch.members) <= batch_tokens
    for window in found:
        firsts = [min(batch.members)[0] for batch in window]
        assert firsts == sorted(firsts), "what is written first is computed first"
        assert max(len(batch.members) for batch in window) >= 1
    ends = [max(item[0] for batch in window for item in batch.members) for window in found]
    assert ends == sorted(ends), "windows follow each other"
    if batch_tokens == 100 and count == 1000:
        padded = sum(len(b.members) * max(n for _, n in b.members) for b in batches)
        assert padded < 1.15 * sum(lengths), "like lengths share a batch"


# The file

SITES = (site("a.weight", 2), site("b.weight", 1))
SETTINGS = {"corpus": {"data": "mark", "loss": "response"}}


def make_schema(**more: Any) -> Schema:
    channels = Channel("act"), Channel("grad")
    return Schema("m", channels, SITES, row_kind="sequence", **({"metadata": SETTINGS} | more))


def sequence(number: int) -> Sequence:
    return Sequence(Record(number, "f.jsonl", number, {}), (1, 2, 3), (False, True, True), f"text {number}")


def row(number: int, loss: float | None = 1.0) -> Measured:
    return Measured(sequence(number), np.arange(6.0) + number, loss)


def test_rows_are_written_in_the_order_of_the_corpus_as_soon_as_it_is_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    file = CorpusFile(path, make_schema(), resume=False)
    file.expect(map(sequence, [3, 1, 2, 7]))
    file.add([row(2), row(7)])
    assert len(pyscan.open(path)) == 0
    file.add([row(1)])
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == [1, 2], "on disk when add returns"
    file.add([row(3, loss=float("nan"))])
    file.close()
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == [1, 2, 3, 7]
        assert run.row_kind == "sequence"
        assert np.allclose(run.act("a", blocks=True)[3] ** 2, [7, 8], rtol=3e-3)
        told = [event for event in run.events if event["kind"] == "sequence"]
        assert [event["text"] for event in told] == ["text 1", "text 2", "text 3", "text 7"]
        assert (told[0]["num_tokens"], told[0]["num_targets"], told[0]["line"]) == (3, 2, 1)
        assert [event["step"] for event in run.events if event["kind"] == "nonfinite_loss"] == [3]
    assert check(path) == []


def test_more_rows_at_once_than_the_writer_queues_are_all_written(tmp_path: Path) -> None:
    file = CorpusFile(tmp_path / "run.mscan", make_schema(), resume=False)
    file.expect(map(sequence, range(1, 501)))
    file.add(map(row, range(2, 501)))
    file.add([row(1)])
    file.close()
    with pyscan.open(tmp_path / "run.mscan") as run:
        assert run.steps["step"].tolist() == list(range(1, 501))
        assert {event["kind"] for event in run.events} == {"sequence"}


def test_a_resumed_file_goes_on_after_its_rows_and_repairs_an_event_that_a_kill_took(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    builder = Builder(make_schema())
    cells = [codecs.encode(np.ones((3, 4)), "log2q8") for _ in range(2)]
    builder.writer.steps(make_rows([1, 2, 3, 5]), cells)
    for number in (1, 2, 5):
        builder.event("sequence", number)
    builder.save(path)
    file = CorpusFile(path, make_schema(), resume=True)
    assert file.done == {1, 2, 3, 5}
    assert [number for number in range(1, 8) if file.lacks(sequence(number))] == [3, 4, 6, 7]
    file.expect(map(sequence, [3, 5, 6, 7]))
    file.add(map(row, [3, 5, 6, 7]))
    file.close()
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == [1, 2, 3, 5, 6, 7]
        told = sorted(event["step"] for event in run.events if event["kind"] == "sequence")
        assert told == [1, 2, 3, 5, 6, 7]
        assert np.allclose(run.act("a", blocks=True)[2], 1), "the row that was there is left alone"
    assert check(path) == []


def test_a_scan_is_not_continued_with_other_settings_or_another_number_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    CorpusFile(path, make_schema(), resume=True).close()
    other = {"corpus": {"data": "mark", "loss": "all"}}
    with pytest.raises(CorpusError, match="was scanned with loss 'response', got 'all'"):
        CorpusFile(path, make_schema(metadata=other), resume=True)
    with pytest.raises(CorpusError, match="was begun by 1 process, got 2"):
        CorpusFile(path, make_schema(rank=0, world=2), resume=True)
    Builder(replace(make_schema(rank=1, world=3))).save(Path(rank_path(str(tmp_path / "other.mscan"), 1)))
    with pytest.raises(CorpusError, match="was begun by 3 processes, got 2"):
        check_world(tmp_path / "other.mscan", make_schema(rank=0, world=2))
    training = Builder(replace(make_schema(), row_kind="step")).save(tmp_path / "training.mscan")
    with pytest.raises(CorpusError, match="is no corpus scan"):
        CorpusFile(training, make_schema(), resume=True)


def test_losses_that_say_nothing_are_told() -> None:
    assert [kind for kind, _ in troubles(row(1, None))] == ["no_targets"]
    assert [kind for kind, _ in troubles(row(1, float("inf")))] == ["nonfinite_loss"]
    assert [kind for kind, _ in troubles(row(1, 0.0))] == ["zero_loss"]
    assert troubles(row(1, 0.5)) == []


# The files of several processes


def write_part(path: Path, rank: int, world: int, steps: list[int], rng: np.random.Generator) -> np.ndarray:
    builder = Builder(make_schema(rank=rank, world=world), run_id=bytes([rank] * 16))
    codes = rng.integers(-3000, 3000, (2, 3, len(steps))).astype(np.int16)
    builder.writer.steps(make_rows(steps), list(codes))
    for step in steps:
        builder.event("sequence", step)
    builder.save(Path(rank_path(str(path), rank)))
    return codes


def test_the_parts_of_a_corpus_scan_are_one_list_in_the_order_of_sequences(tmp_path: Path) -> None:
    path, rng = tmp_path / "run.mscan", np.random.default_rng(0)
    places = {0: [1, 4, 5, 9], 1: [2, 3, 8], 2: []}
    codes = {rank: write_part(path, rank, 3, steps, rng) for rank, steps in places.items()}
    with pyscan.open(path) as run:
        assert run.row_kind == "sequence"
        assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 8, 9]
        order = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (0, 3)]
        for number, channel in enumerate(("act", "grad")):
            want = np.stack([codes[rank][number, :, place] for rank, place in order])
            assert np.array_equal(run.codes(channel, "a"), want[:, :2])
            assert np.array_equal(run.codes(channel, "b", steps=slice(2, 6)), want[2:6, 2:])
            assert np.array_equal(run.get(channel, "b", blocks=True), codecs.decode(want[:, 2:], "log2q8"))
        assert [event["step"] for event in run.events] == [1, 2, 3, 4, 5, 8, 9]
        assert {event["kind"] for event in run.events} == {"sequence"}
        assert run.damage == []
    assert check(path) == []
    from pyscan.rewrite import merge

    merge(path, tmp_path / "whole.mscan")
    with pyscan.open(path) as parts, pyscan.open(tmp_path / "whole.mscan") as whole:
        assert whole.row_kind == "sequence"
        assert whole.steps["step"].tolist() == parts.steps["step"].tolist()
        assert np.array_equal(whole.codes("grad", "a"), parts.codes("grad", "a"))


def test_a_process_without_a_file_leaves_its_sequences_out_and_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    write_part(path, 0, 2, [1, 3], np.random.default_rng(0))
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == [1, 3]
        assert next((event["kind"], event["rank"]) for event in run.events) == ("rank_missing", 1)
        assert not codecs.is_absent(run.codes("act", "a")).any()
        before = len(run)
        write_part(path, 1, 2, [2], np.random.default_rng(1))
        run.refresh()
        assert (before, run.steps["step"].tolist()) == (2, [1, 2, 3])


def test_what_a_row_is_stands_in_the_schema() -> None:
    assert b"row_kind" not in replace(make_schema(), row_kind="step").to_json()
    assert Schema.from_json(make_schema().to_json()).row_kind == "sequence"
    raw = json.loads(make_schema().to_json()) | {"row_kind": "day"}
    with pytest.raises(pyscan.ScanError, match="row_kind"):
        Schema.from_json(json.dumps(raw).encode())
