"""The cost model of the GPU engine: the document shows what the script computes, and the model obeys its own limits."""

import pytest

from benchmarks import roofline
from benchmarks.roofline import GPUS, SHAPES, TOKENS, cost


def test_the_document_has_the_table_of_the_script() -> None:
    assert roofline.DOCUMENT.read_text() == roofline.document(), "run: python benchmarks/roofline.py --write"


def test_a_model_of_28_layers_needs_at_most_70_launches_a_step() -> None:
    for shape in SHAPES:
        if shape.layers == 28:
            assert max(cost(shape, tokens, 1).num_launches for tokens in TOKENS) <= 70


def test_sharding_divides_what_is_read_of_gradients_only() -> None:
    whole, part = (cost(SHAPES[0], 4096, shards) for shards in (1, 8))
    assert part.activation_bytes == whole.activation_bytes
    assert part.gradient_bytes * 8 == pytest.approx(whole.gradient_bytes, rel=1e-6)


def test_bytes_are_those_of_the_tensors() -> None:
    shape = SHAPES[0]
    layer = 4096 * (1024 + 2048 + 1024 + 3072) * 2
    assert cost(shape, 4096, 1).activation_bytes == 28 * layer + 2 * 4096 * 1024 * 2
    weights = 1024 * 2048 * 2 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    assert cost(shape, 4096, 1).gradient_bytes == (28 * weights + 151936 * 1024) * 2


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_share_falls_with_the_number_of_tokens(gpu: roofline.Gpu) -> None:
    shares = [cost(SHAPES[2], t, 1).seconds(gpu) / roofline.step_seconds(SHAPES[2], t, gpu) for t in TOKENS]
    assert shares == sorted(shares, reverse=True)
