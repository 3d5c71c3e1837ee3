"""Writes the files in tests/data, which are kept so that a change of the format cannot go unseen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pyscan.version1 import HEADER, RECORD_DTYPE
from tests.make_scan import Builder, make_schema

DATA = Path(__file__).parent / "data"


def every_value() -> bytes:
    """65,536 records (64 tokens, 4 sites, 256 blocks) in which every uint16 value occurs once in both columns."""
    token, param, block = np.meshgrid(np.arange(64), np.arange(4), np.arange(256), indexing="ij")
    records = np.zeros(65536, RECORD_DTYPE)
    records["token_idx"], records["param_id"], records["block_idx"] = token.ravel(), param.ravel(), block.ravel()
    records["activation"] = np.arange(65536)
    records["grad_norm"] = np.arange(65536) * 40503 % 65536  # an odd factor: a permutation
    header = {
        "format_version": "1.1",
        "model_name": "every/value",
        "timestamp": "20250101_000000",
        "id_to_param_name_map": {str(i): f"layers.{i}.proj" for i in range(4)},
        "sequences": [{"sequence_id": i, "num_tokens": 32, "source": f"text {i} ü"} for i in range(2)],
    }
    text = json.dumps(header).encode()
    return HEADER.pack(b"MSCAN", 1, HEADER.size + len(text), 65536) + text + records.tobytes()


def golden() -> bytes:
    """Every kind of frame, a resume and an index, in 5 KB."""
    builder = Builder(make_schema((2, 1))).steps(range(1, 11)).event("first_nonfinite", 4).tokens(3).event("gone", 9)
    return bytes(builder.steps(range(8, 12), resumed=True).event("resume", 8).index().main)


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    (DATA / "every_value_v1.1.mscan").write_bytes(every_value())
    (DATA / "golden_v2.mscan").write_bytes(golden())
