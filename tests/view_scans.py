"""Scans for the tests of pictures: a model of two layers like the demo's, with values that are known and odd."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyscan import codecs
from pyscan.payloads import TokenArray, encode_tokens
from pyscan.schema import Channel, Schema, SiteInfo
from tests.make_scan import Builder, make_rows

HOSTILE = "</script><script>alert(1)</script>"
CHANNELS = (
    Channel("act"),
    Channel("grad"),
    Channel("act_max", per="site", transform="plain", op="max"),
    Channel("grad_bad", per="site", codec="f32", transform="plain", op="add"),
)
MODULES = {"self_attn.q_proj": 2, "self_attn.o_proj": 2, "mlp.up_proj": 2, "mlp.down_proj": 5}
SPIKE = 70  # the step of the one alarm


def view_schema(**more: object) -> Schema:
    names = {"model.embed_tokens.weight": 2}
    names |= {f"model.layers.{i}.{name}.weight": blocks for i in range(2) for name, blocks in MODULES.items()}
    names |= {f"lm_head{HOSTILE}": 2}
    sites = [SiteInfo(name, "linear", (8, 64 * n - 3), "float32", n) for name, n in names.items()]
    return Schema("tiny", CHANNELS, tuple(sites), **more)


def view_cells(schema: Schema, steps: range, factor: float = 1.0) -> list[np.ndarray]:
    """Norms between 2^-8 and 2^8 that rise and fall; in act of the last site a 0, a NaN, an infinity and an absence."""
    chance = np.random.default_rng(5)
    sections = []
    for channel in schema.channels:
        count = sum(site.num_cells(channel.per) for site in schema.sites)
        levels = chance.uniform(-6, 6, (count, 1)) + 2 * np.sin(np.arange(count)[:, None] + np.asarray(steps) / 9)
        values = (factor * np.exp2(levels)).astype(np.float32)
        if channel.name == "act":
            values[-1, [s == 4 for s in steps]] = 0.0
            values[-1, [s == 5 for s in steps]] = np.nan
            values[-1, [s == 6 for s in steps]] = np.inf
            values[-1, [s == 7 for s in steps]] = codecs.ABSENT
        sections.append(codecs.encode(np.zeros_like(values) if channel.codec == "f32" else values, channel.codec))
    return sections


def make_view_scan(path: Path, num_steps: int = 100, *, factor: float = 1.0, tokens: bool = False) -> Path:
    builder = Builder(view_schema())
    for start in range(1, num_steps + 1, 64):
        steps = range(start, min(start + 64, num_steps + 1))
        builder.writer.steps(make_rows(steps), view_cells(builder.schema, steps, factor))
    builder.event("attached", 1, cells=22, not_scanned={"model.frozen.weight": "frozen"})
    builder.events({"kind": "spike", "step": SPIKE, "site": "model.layers.1.mlp.up_proj.weight", "text": "too large"})
    builder.event("execution_order", 1, forward=[0], backward=[0])
    if tokens:
        builder.writer.tokens(token_frame())
    builder.event("closed", num_steps, overhead=0.0123)
    return builder.index().save(path)


TOKEN_NORMS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])


def token_frame(step: int = 50) -> bytes:
    ids = np.arange(10, 16, dtype="<i4").reshape(1, -1)
    norms = {"act": TOKEN_NORMS, "grad": TOKEN_NORMS[::-1]}
    arrays = [TokenArray(1, name, "log2q8", codecs.encode(v.reshape(1, -1), "log2q8")) for name, v in norms.items()]
    return encode_tokens(step, 6, ids, arrays)
