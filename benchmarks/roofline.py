"""What a scan must cost on a GPU: bytes read, kernels launched, and their share of a training step. A model, no timing.

Receives the shapes of known models and the data sheets of known GPUs; prints the table of docs/gpu.md, or with --write
puts it there. Launches are counted with the same rules by which the engine forms its groups.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from pyscan import groups

DOCUMENT = Path(__file__).parent.parent / "docs" / "gpu.md"
BEGIN, END = "<!-- table of benchmarks/roofline.py -->", "<!-- end of table -->"

MODEL_FLOPS_SHARE = 0.40  # of the peak that training reaches
MEMORY_SHARE = 0.88  # of the peak that a plain read reaches
SECONDS_PER_LAUNCH = 4e-6  # that the GPU needs between two kernels which depend on each other
SEQUENCE = 4096
MICRO_BATCH = 8192  # tokens per forward
ELEMENT_BYTES = 2  # activations and gradients in bfloat16
LAUNCHES_PER_GROUP = 2
NUM_SHARDS = 8
TOKENS = (4096, 8192, 16384, 32768)


class Gpu(NamedTuple):
    name: str
    peak_flops: float  # dense bfloat16
    bytes_per_second: float


class Shape(NamedTuple):
    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    fits_whole: bool = True  # weights, gradients and optimizer on one GPU


GPUS = (Gpu("A100", 312e12, 2.039e12), Gpu("H100", 989e12, 3.35e12), Gpu("B200", 2250e12, 8.0e12))
SHAPES = (
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936),
    Shape("Qwen3-1.7B", 2048, 6144, 28, 16, 8, 128, 151936),
    Shape("Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936),
    Shape("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256),
    Shape("Llama-3-70B", 8192, 28672, 80, 64, 8, 128, 128256, fits_whole=False),
)


class Cost(NamedTuple):
    """Of one scanned step on one GPU."""

    activation_bytes: int
    gradient_bytes: int
    num_launches: int

    def seconds(self, gpu: Gpu) -> float:
        """Nothing overlaps: the worst that can happen."""
        num_bytes = self.activation_bytes + self.gradient_bytes
        return num_bytes / (gpu.bytes_per_second * MEMORY_SHARE) + self.num_launches * SECONDS_PER_LAUNCH


def weights_of_layer(shape: Shape) -> list[int]:
    """Elements of q, k, v, o, gate, up, down."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = shape.hidden * shape.intermediate
    return [shape.hidden * q, shape.hidden * kv, shape.hidden * kv, q * shape.hidden, mlp, mlp, mlp]


def inputs_of_layer(shape: Shape) -> list[int]:
    """Features of the tensors that are read: q, k and v share one, gate and up another."""
    return [shape.hidden, shape.heads * shape.head_dim, shape.hidden, shape.intermediate]


def step_seconds(shape: Shape, tokens: int, gpu: Gpu) -> float:
    """Forward and backward of the linear weights and of causal attention."""
    linear = shape.layers * sum(weights_of_layer(shape)) + shape.vocabulary * shape.hidden
    attention = shape.layers * shape.heads * shape.head_dim * min(SEQUENCE, tokens)
    return 6 * (linear + attention) * tokens / (gpu.peak_flops * MODEL_FLOPS_SHARE)


def cost(shape: Shape, tokens: int, shards: int) -> Cost:
    """With `shards` > 1 each GPU holds, and reads, that part of every gradient."""
    num_forwards = -(-tokens // MICRO_BATCH)
    rows = tokens // num_forwards
    inputs = [rows * features * ELEMENT_BYTES for features in inputs_of_layer(shape) * shape.layers]
    inputs.append(rows * shape.hidden * ELEMENT_BYTES)  # of the head
    looked_up = rows * shape.hidden * ELEMENT_BYTES
    gradients = [n * ELEMENT_BYTES // shards for n in weights_of_layer(shape) * shape.layers]
    gradients.append(shape.vocabulary * shape.hidden * ELEMENT_BYTES // shards)
    input_groups = num_forwards * _num_groups(inputs, sum(inputs) * num_forwards)
    launches = LAUNCHES_PER_GROUP * (input_groups + num_forwards + _num_groups(gradients, sum(gradients))) + 1
    return Cost(num_forwards * (sum(inputs) + looked_up), sum(gradients), launches)


def _num_groups(sizes: list[int], total: int) -> int:
    """Groups that the engine makes of tensors of these sizes, when the step before had `total` bytes."""
    limit = groups.group_bytes(total)
    count, filled = 1, 0
    for size in sizes:
        if filled and filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count


def table() -> str:
    """Markdown: for each model and number of tokens, bytes, launches and the share of a step on each GPU."""
    lines = [
        "| model | tokens | gradients | activations | gradients | launches | "
        + " | ".join(g.name for g in GPUS)
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(GPUS),
    ]
    for shape in SHAPES:
        for tokens in TOKENS:
            all_shards = (1, NUM_SHARDS) if shape.fits_whole else (NUM_SHARDS,)
            lines += [_line(shape, tokens, shards) for shards in all_shards]
    return "\n".join(lines)


def _line(shape: Shape, tokens: int, shards: int) -> str:
    found = cost(shape, tokens, shards)
    shares = [found.seconds(gpu) / step_seconds(shape, tokens, gpu) for gpu in GPUS]
    cells = [
        shape.name,
        str(tokens),
        "whole" if shards == 1 else f"1/{shards}",
        f"{found.activation_bytes / 1e9:.2f} GB",
        f"{found.gradient_bytes / 1e9:.2f} GB",
        str(found.num_launches),
        *(f"{share:.2%}" for share in shares),
    ]
    return "| " + " | ".join(cells) + " |"


def document() -> str:
    """docs/gpu.md with the table as it is now."""
    text = DOCUMENT.read_text()
    return text[: text.index(BEGIN) + len(BEGIN)] + "\n" + table() + "\n" + text[text.index(END) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    if parser.parse_args().write:
        DOCUMENT.write_text(document())
    else:
        print(table())


if __name__ == "__main__":
    main()
