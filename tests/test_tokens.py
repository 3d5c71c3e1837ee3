"""Tokens mode: every number equals what autograd gives with one copy of the weight per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pyscan
from tests import families
from tests.token_reference import Copies, block_norms, gradients

BLOCK = 16
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
# torch's grouped product has no float64: the loop over experts stands in for it there
CASES = [
    ("llama", torch.float64),
    ("llama", torch.float32),
    ("llama-tied", torch.float64),
    ("gpt2", torch.float64),
    ("gpt2", torch.float32),
    ("mixtral-eager", torch.float64),
    ("mixtral-batched_mm", torch.float64),
    ("mixtral-grouped_mm", torch.float32),
    ("qwen3_moe", torch.float32),
]
ROUTERS = ".mlp.gate.weight"  # not an nn.Linear: the reference leaves them alone


def sites_of(tokens: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: rows for name, rows in tokens.items() if isinstance(rows, dict)}


def build(name: str, dtype: torch.dtype = torch.float64) -> families.Family:
    family = families.build(name)
    family.model.to(dtype)
    return family


def scanned(family: families.Family, mode: bool | str, **options: Any) -> dict[str, Any]:
    """The token rows of one step."""
    with pyscan.attach(family.model, tokens=mode, block=BLOCK, **options) as scan:
        family.loss().backward()
        scan.step()
        assert [event for event in scan.events if event["kind"] == "off"] == []
        return scan.tokens()


def close(found: Any, wanted: Tensor, bound: float) -> None:
    wanted = wanted.double().numpy()
    assert found.shape == wanted.shape
    # Gradients that cancel to nearly nothing are rounding in autograd itself, on the scale of those beside them.
    np.testing.assert_allclose(found, wanted, rtol=bound, atol=0.1 * bound * wanted.max(initial=0.0))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rows_equal_autograd_with_a_weight_copy_per_token(name: str, dtype: torch.dtype) -> None:
    family = build(name, dtype)
    wanted = gradients(family.model, family.loss)
    found = sites_of(scanned(family, True))
    assert set(found) - {n for n in found if n.endswith(ROUTERS)} == set(wanted)
    for site, copies in wanted.items():
        rows, grad = found[site], copies.grad
        contribution = rows["contribution"].ravel()
        if "positions" in rows:
            contribution = contribution[np.argsort(rows["positions"], kind="stable")]
            assert sorted(rows["positions"]) == sorted(copies.token)
        close(contribution, grad.flatten(1).norm(dim=1), BOUNDS[dtype])


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_blocks_equal_autograd_with_a_weight_copy_per_token(name: str, dtype: torch.dtype) -> None:
    family = build(name, dtype)
    wanted = gradients(family.model, family.loss)
    found = sites_of(scanned(family, "blocks"))
    for site, copies in wanted.items():
        rows, grad = found[site], copies.grad
        order = np.argsort(rows["positions"], kind="stable") if "positions" in rows else slice(None)
        contribution = rows["contribution"]
        if grad.ndim == 2:  # an embedding
            close(contribution.reshape(len(grad), -1), block_norms(grad[:, None], BLOCK)[:, 0], BOUNDS[dtype])
        else:
            blocks = contribution.reshape(len(grad), *contribution.shape[-2:])[order]
            close(blocks, block_norms(grad, BLOCK), BOUNDS[dtype])


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_sequences_equal_autograd_with_a_weight_copy_per_token(name: str, dtype: torch.dtype) -> None:
    family = build(name, dtype)
    wanted = gradients(family.model, family.loss)
    tokens = scanned(family, "sequences")
    found = sites_of(tokens)
    assert tokens["sequences"].tolist() == [[0, 7], [7, 7]]
    unknown = {"transformer.wpe.weight"}  # its rows are positions, which the sequences share
    assert set(wanted) - set(found) == unknown & set(wanted)
    for site in set(wanted) & set(found):
        check_sequences(found[site], wanted[site], family, tokens["sequences"], BOUNDS[dtype])


def check_sequences(
    rows: dict[str, Any], copies: Copies, family: families.Family, sequences: Any, bound: float
) -> None:
    grad, ids = copies.grad.double(), family.batch["input_ids"].flatten()
    for number, (first, length) in enumerate(sequences):
        mine = torch.from_numpy((copies.token >= first) & (copies.token < first + length))
        if not mine.any():
            assert pyscan.is_absent(rows["grad"][number]).all()
            continue
        if grad.ndim == 2:
            total = torch.zeros(families.VOCAB, grad.shape[1], dtype=grad.dtype).index_add(0, ids[mine], grad[mine])
        else:
            total = grad[mine].sum(0)
        width = BLOCK if rows["grad"].shape[1] > 1 else 1 << 20
        wanted = torch.stack([part.norm() for part in total.split(width, 1)])
        close(rows["grad"][number], wanted, bound)
