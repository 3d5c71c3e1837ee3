"""Tokens mode: every number equals what autograd gives with one copy of the weight per token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pyscan
from tests import families
from tests.token_reference import block_norms, gradients

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


class Reference:
    """The gradients of autograd with a weight copy per token, and how far from the truth they are themselves.

    Some gradients are exactly 0 on paper: that of a query whose position sees itself alone. What float32 makes of them
    is rounding, in autograd as in the scanner, on the scale of the terms that cancel; float64 shows how much that is.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        family = build(name, dtype)
        self.copies = gradients(family.model, family.loss)
        self._bound = BOUNDS[dtype]
        exact = build(name, torch.float64)
        self._exact = gradients(exact.model, exact.loss) if dtype == torch.float32 else None

    def check(self, site: str, found: Any, norms: Callable[[Tensor], Tensor]) -> None:
        """`norms` of the site's gradients are what was found: to the bound, but for autograd's own error."""
        wanted = norms(self.copies[site].grad.double()).numpy()
        assert found.shape == wanted.shape
        rounding = 1e-3 * self._bound * wanted.max(initial=0.0)  # float64: four roundings of the largest value
        if self._exact is not None:
            assert np.array_equal(self._exact[site].token, self.copies[site].token), "experts got other tokens"
            error = np.abs(wanted - norms(self._exact[site].grad).numpy()).max(initial=0.0)
            assert error < 1e-6 * wanted.max(initial=0.0)
            rounding = 2 * error  # without the copies autograd rounds differently, on the same scale
        np.testing.assert_allclose(found, wanted, rtol=self._bound, atol=rounding, err_msg=site)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rows_equal_autograd_with_a_weight_copy_per_token(name: str, dtype: torch.dtype) -> None:
    wanted = Reference(name, dtype)
    found = sites_of(scanned(build(name, dtype), True))
    assert set(found) - {n for n in found if n.endswith(ROUTERS)} == set(wanted.copies)
    for site, copies in wanted.copies.items():
        rows = found[site]
        contribution = rows["contribution"].ravel()
        if "positions" in rows:
            contribution = contribution[np.argsort(rows["positions"], kind="stable")]
            assert sorted(rows["positions"]) == sorted(copies.token)
        wanted.check(site, contribution, lambda grad: grad.flatten(1).norm(dim=1))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_blocks_equal_autograd_with_a_weight_copy_per_token(name: str, dtype: torch.dtype) -> None:
    wanted = Reference(name, dtype)
    found = sites_of(scanned(build(name, dtype), "blocks"))
    for site, copies in wanted.copies.items():
        rows, grad = found[site], copies.grad
        order = np.argsort(rows["positions"], kind="stable") if "positions" in rows else slice(None)
        contribution = rows["contribution"]
        if grad.ndim == 2:  # an embedding
            blocks = contribution.reshape(len(grad), -1)
            wanted.check(site, blocks, lambda grad: block_norms(grad[:, None], BLOCK)[:, 0])
        else:
            blocks = contribution.reshape(len(grad), *contribution.shape[-2:])[order]
            wanted.check(site, blocks, lambda grad: block_norms(grad, BLOCK))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_sequences_equal_autograd_with_a_weight_copy_per_token(name: str, dtype: torch.dtype) -> None:
    wanted, family = Reference(name, dtype), build(name, dtype)
    tokens = scanned(family, "sequences")
    found = sites_of(tokens)
    assert tokens["sequences"].tolist() == [[0, 7], [7, 7]]
    unknown = {"transformer.wpe.weight"}  # its rows are positions, which the sequences share
    assert set(wanted.copies) - set(found) == unknown & set(wanted.copies)
    for site in set(wanted.copies) & set(found):
        rows, token = found[site]["grad"], wanted.copies[site].token
        for number, (first, length) in enumerate(tokens["sequences"]):
            mine = torch.from_numpy((token >= first) & (token < first + length))
            if not mine.any():
                assert pyscan.is_absent(rows[number]).all()
                continue
            wanted.check(
                site, rows[number], partial(sequence_norms, family, mine, BLOCK if rows.shape[1] > 1 else None)
            )


def sequence_norms(family: families.Family, mine: Tensor, block: int | None, grad: Tensor) -> Tensor:
    """The norms of a sequence's own part of a gradient, per block of columns, or of all of it."""
    if grad.ndim == 2:  # an embedding
        ids = family.batch["input_ids"].flatten()
        total = torch.zeros(families.VOCAB, grad.shape[1], dtype=grad.dtype).index_add(0, ids[mine], grad[mine])
    else:
        total = grad[mine].sum(0)
    return torch.stack([part.norm() for part in total.split(block or total.shape[1], 1)])
