"""Records of a corpus as token ids, with the mark of those that carry loss.

Receives records and a tokenizer; hands on sequences. Pieces of a record (prompt and response, the turns of a chat) are
tokenised one by one, so that a response has the tokens it would have been generated with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyscan.corpus import Record


class CorpusError(ValueError):
    """A corpus, model or scan that does not fit; the message says which and what to do."""


@dataclass(frozen=True)
class Sequence:
    """One row to be: its tokens, and which of them are predicted and counted in its loss."""

    record: Record
    ids: tuple[int, ...]
    is_target: tuple[bool, ...]  # never the first token: nothing predicts it
    text: str
    num_cut: int = 0  # tokens that max_length left out

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def num_targets(self) -> int:
        return sum(self.is_target)

    def answered(self, answer: tuple[int, ...], text: str, *, loss: str) -> Sequence:
        """The sequence with what was generated for it."""
        ids = self.ids + answer
        known = [loss == "all"] * len(self.ids)
        return replace(self, ids=ids, is_target=_targets([*known, *[True] * len(answer)]), text=self.text + text)


Piece = tuple[str, bool]  # text, and whether it carries loss


class Encoder:
    """Tokenises records. `loss` is "response" or "all"; `generate` is how many tokens are to be generated."""

    def __init__(self, tokenizer: Any, *, loss: str, max_length: int | None, generate: int = 0) -> None:
        self._tokenizer = tokenizer
        self._loss = loss
        self._max_length = max_length
        self._generate = generate
        empty = tokenizer("")["input_ids"]
        self._begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id in empty else []

    def encode(self, record: Record) -> Sequence:
        pieces = self._pieces(record)
        ids = [] if "messages" in record.body else list(self._begin)  # a template writes its own
        marks = [False] * len(ids)
        for text, carries_loss in pieces:
            new = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            ids += new
            marks += [carries_loss or self._loss == "all"] * len(new)
        kept = self._kept(len(ids))
        text = "".join(text for text, _ in pieces)
        return Sequence(record, tuple(ids[kept]), _targets(marks[kept]), text, len(ids) - len(ids[kept]))

    def _kept(self, length: int) -> slice:
        """Which tokens stay: the first ones, or of a prompt the last ones, with room for its answer."""
        if self._max_length is None:
            return slice(None)
        room = self._max_length - self._generate
        return slice(max(length - room, 0), None) if self._generate else slice(room)

    def _pieces(self, record: Record) -> list[Piece]:
        body = record.body
        if "messages" in body:
            return self._chat(record)
        if "prompt" in body:
            return [(body["prompt"], False)] + ([] if self._generate else [(body["response"], True)])
        return [(body["text"], True)]

    def _chat(self, record: Record) -> list[Piece]:
        """The template's text, cut where the assistant's turns begin and end."""
        messages = record.body["messages"]
        if self._generate and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        whole = self._render(record, messages, prompt=bool(self._generate))
        if self._loss == "all":
            return [(whole, True)]
        pieces, done = [], 0
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin = self._render(record, messages[:place], prompt=True)
            end = self._render(record, messages[: place + 1], prompt=False)
            if not (whole.startswith(begin) and whole.startswith(end)):
                raise CorpusError(
                    f"{record.place}: the chat template rewrites earlier turns, so that the tokens of a response "
                    "cannot be told from the others; use --loss all, or give prompt and response"
                )
            pieces += [(whole[done : len(begin)], False), (whole[len(begin) : len(end)], True)]
            done = len(end)
        return [*pieces, (whole[done:], False)]

    def _render(self, record: Record, messages: list[dict[str, str]], *, prompt: bool) -> str:
        if not messages:
            return ""
        if not getattr(self._tokenizer, "chat_template", None):
            raise CorpusError(
                f"{record.place} has messages, and the tokenizer has no chat template: "
                "give prompt and response, or text"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # templates are programs: they refuse what they do not like in their own words
            raise CorpusError(f"{record.place}: the chat template refuses it: {error}") from error
        return text


def _targets(marks: list[bool]) -> tuple[bool, ...]:
    return (False, *marks[1:]) if marks else ()
