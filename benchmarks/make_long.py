"""A long run made in seconds: 300 sites of one block each, every channel a scanner writes, any number of steps.

`benchmarks/bench_view.py` and the slow tests look at it; its values drift and wander, and one site has a spike.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pyscan import format as fmt
from pyscan.frame_writer import FrameWriter
from pyscan.schema import Channel, Schema, SiteInfo

NUM_STEPS = 100_000
NUM_LAYERS = 43
MODULES = {
    "self_attn.q_proj": (512, 512),
    "self_attn.k_proj": (256, 512),
    "self_attn.v_proj": (256, 512),
    "self_attn.o_proj": (512, 512),
    "mlp.gate_proj": (1408, 512),
    "mlp.up_proj": (1408, 512),
    "mlp.down_proj": (512, 1408),
}
CHANNELS = (
    Channel("act"),
    Channel("grad"),
    Channel("act_max", per="site", transform="plain", op="max"),
    Channel("grad_max", per="site", transform="plain", op="max"),
    Channel("act_bad", per="site", codec="f32", transform="plain", op="add"),
    Channel("grad_bad", per="site", codec="f32", transform="plain", op="add"),
)
SPIKE_STEP, SPIKE_SITE = 61_803, 150


def long_schema() -> Schema:
    names = [f"model.layers.{i}.{module}.weight" for i in range(NUM_LAYERS) for module in MODULES]
    shapes = [*MODULES.values()] * NUM_LAYERS
    names = ["model.embed_tokens.weight", *names[: 300 - 2], "lm_head.weight"]
    shapes = [(6400, 512), *shapes[: 300 - 2], (6400, 512)]
    sites = tuple(SiteInfo(name, "linear", shape, "float32", 1) for name, shape in zip(names, shapes, strict=True))
    return Schema("long", CHANNELS, sites, block=0)


def make_long(path: Path, num_steps: int = NUM_STEPS) -> Path:
    """Norms as log2q8 codes: a level of each site, a slow drift, and the noise of a step."""
    schema, chance = long_schema(), np.random.default_rng(0)
    num_sites = len(schema.sites)
    base, drift = chance.uniform(-512, 512, (4, num_sites, 1)), chance.uniform(-256, 256, (4, num_sites, 1))
    noise = chance.integers(-40, 41, (4, num_sites, 64 * 8), dtype=np.int16)
    with path.open("wb") as file:
        writer = FrameWriter(file.write, bytes(range(16)), 1_700_000_000_000_000_000)
        writer.schema(schema)
        for start in range(0, num_steps, 64):
            steps = np.arange(start, min(start + 64, num_steps)) + 1
            at = (start // 64 * 37) % (noise.shape[-1] - 63)
            levels = base + drift * (steps / num_steps) + noise[:, :, at : at + len(steps)]
            codes = levels.astype("<i2")
            codes[1, SPIKE_SITE, steps == SPIKE_STEP] = 256 * 12
            zeros = np.zeros((num_sites, len(steps)), "<f4")
            writer.steps(_rows(steps), [*(np.ascontiguousarray(part) for part in codes), zeros, zeros])
        writer.events([{"kind": "spike", "step": SPIKE_STEP, "site": schema.sites[SPIKE_SITE].name, "text": "planted"}])
        writer.index()
    return path


def _rows(steps: np.ndarray) -> np.ndarray:
    rows = np.zeros(len(steps), fmt.ROW_DTYPE)
    rows["step"], rows["tokens"] = steps, 340
    rows["time_ns"] = 1_700_000_000_000_000_000 + steps * 250_000_000
    rows["loss"] = 2 + 6 * np.exp(-steps / 20_000) + 0.05 * np.sin(steps)
    rows["flags"] = fmt.ROW_HAS_TOKENS | fmt.ROW_HAS_LOSS
    return rows


if __name__ == "__main__":
    make_long(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else NUM_STEPS)
