"""Settings shared by all tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A runner of tests in several processes says how wide its terminal is; what is written to a pipe has no such width.
os.environ.pop("COLUMNS", None)
