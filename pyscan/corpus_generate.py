"""Answers to the prompts of a batch, before their teacher-forced pass; greedy, so that they are the same every time.

Receives sequences that are prompts; hands them on with their answers. `generate` runs without gradients, which the
scanner does not record.
"""

from __future__ import annotations

from typing import Any

import torch

from pyscan.corpus_tokens import Sequence


def answer(model: Any, tokenizer: Any, sequences: list[Sequence], *, num_tokens: int, loss: str) -> list[Sequence]:
    """Each sequence with at most `num_tokens` tokens of the model's own; an empty prompt stays as it is."""
    prompts = [sequence for sequence in sequences if sequence.ids]
    if not prompts:
        return sequences
    longest = max(len(sequence.ids) for sequence in prompts)
    ends = end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(prompts):  # on the right side, where generation goes on
        ids[row, longest - len(sequence.ids) :] = torch.tensor(sequence.ids)
        mask[row, longest - len(sequence.ids) :] = 1
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "num_beams": 1}
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=num_tokens,
        pad_token_id=pad,
        **greedy,
    )
    answers = {
        sequence.number: _until_end(row, ends) for sequence, row in zip(prompts, out[:, longest:].tolist(), strict=True)
    }
    return [
        sequence.answered(found, tokenizer.decode(found), loss=loss)
        if (found := answers.get(sequence.number)) is not None
        else sequence
        for sequence in sequences
    ]


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    told = getattr(model.generation_config, "eos_token_id", None)
    found = told if isinstance(told, list) else [told]
    return {end for end in (*found, tokenizer.eos_token_id) if end is not None}


def _until_end(ids: list[int], ends: set[int]) -> tuple[int, ...]:
    """What comes up to the first token that ends an answer, with it; behind it is padding."""
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return tuple(ids[: stop + 1])
