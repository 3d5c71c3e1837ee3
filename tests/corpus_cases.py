"""What the tests of corpus scans share: a tiny trained model with its tokenizer, and corpora in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.loop import ROOT, make_job

CORPORA = ROOT / "examples" / "corpora"
TOPICS = ("arithmetic", "code", "prose")
SIZES = "--hidden 64 --layers 2 --heads 4 --vocabulary 500 --context 96 --corpus-bytes 100000 --steps 25 --lr 3e-3"


def train_model(directory: Path) -> Path:
    """Seconds of training: enough that weights are no longer those of the start."""
    torch.manual_seed(0)
    example, job = make_job(directory, *SIZES.split())
    example.train(job)
    job.save_model()
    return directory / "model"


def write_lines(path: Path, *bodies: Any) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def texts(path: Path, *lines: str) -> Path:
    return write_lines(path, *({"text": line} for line in lines))
