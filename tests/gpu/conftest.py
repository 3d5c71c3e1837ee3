"""Which tests of this directory run: those of the interpreter in a process of their own, see test_gpu_interpreter.py."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
