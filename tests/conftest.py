"""Settings shared by all tests."""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Some virtual machines say that they have AMX and do not execute it: there torch dies in its first bfloat16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A runner of tests in several processes says how wide its terminal is; what is written to a pipe has no such width.
os.environ.pop("COLUMNS", None)

# What a shell starts in the background ignores interrupts, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny language model with its tokenizer, trained for seconds."""
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from tests.corpus_cases import train_model

    return train_model(tmp_path_factory.mktemp("trained"))
