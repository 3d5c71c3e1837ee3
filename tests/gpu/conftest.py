"""Which tests of this directory run: all in a process with the interpreter (test_gpu_interpreter.py), else none."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
