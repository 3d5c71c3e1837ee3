"""Count the instructions of the hot paths and fail if there are more than in benchmarks/results/instructions.json.

python -m benchmarks.instructions             # the gate: `make bench-gate`
python -m benchmarks.instructions --update    # keep what is counted now: `make bench-gate-update`
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.instructions.judge import compare, per_site, table

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KEPT = ROOT / "benchmarks" / "results" / "instructions.json"
# Where objects come to lie changes what a step executes by up to 0.2 %, and a site's part in it by 10 %: so steps are
# counted in several processes, each with so many bytes more of environment, and the median counts.
LAYOUTS = (0, 1000, 2000)
# A dump is of one thread; the first is the one that trains.
VALGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes", "--quiet")


def requests(directory: Path) -> Path:
    """The library through which a program speaks to valgrind."""
    library = directory / "requests.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(HERE / "requests.c"), "-o", str(library)], check=True)
    return library


def count(program: str, directory: Path, layout: int = 0) -> dict[str, float]:
    """Instructions per call of everything that the program counts."""
    directory.mkdir()
    environment = os.environ | {
        "PYSCAN_ISA": counted_isa(),
        "PYSCAN_LAYOUT": layout * "-",
        "PYSCAN_CALLGRIND_REQUESTS": str(requests(directory)),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    out = directory / f"{program}.out"
    command = [*VALGRIND, f"--callgrind-out-file={out}", sys.executable, "-m", f"benchmarks.instructions.{program}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{program} failed under valgrind:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return dict(filter(None, map(_read, directory.glob(f"{program}.out*"))))


def _read(dump: Path) -> tuple[str, float] | None:
    text = dump.read_text()
    label = re.search(r"^desc: Trigger: Client Request: (.*)\|(\d+)$", text, re.M)
    thread = re.search(r"^thread: (\d+)$", text, re.M)
    total = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
    if label is None or total is None or (thread is not None and thread[1] != "1"):
        return None
    return label[1], int(total[1]) / int(label[2])


def counted_isa() -> str:
    """The loops that are counted: valgrind executes no AVX-512."""
    from pyscan import _C

    return "avx2" if _C.isa == "avx512" else _C.isa


def circumstances() -> dict[str, str]:
    """What the counts depend on besides the source."""
    import torch

    from pyscan import _C

    names = {"compiler": _C.compiler, "isa": counted_isa(), "torch": torch.__version__}
    return names | {"python": platform.python_version(), "machine": platform.machine()}


def counts() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="pyscan-counts-") as home, ThreadPoolExecutor(os.cpu_count()) as pool:
        core = pool.submit(count, "core_paths", Path(home) / "core")
        steps = list(pool.map(lambda layout: count("hook_path", Path(home) / f"steps{layout}", layout), LAYOUTS))
    found = core.result() | {name: statistics.median(one[name] for one in steps) for name in steps[0]}
    return found | per_site(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__.split("\n")[0])
    parser.add_argument("--update", action="store_true", help="keep what is counted now")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed: apt-get install valgrind")
    found, now = counts(), circumstances()
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    print(table(found, kept.get("counts", {})))
    if arguments.update:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps({"circumstances": now, "counts": found}, indent=1, sort_keys=True) + "\n")
    elif kept.get("circumstances") != now:
        print(f"NOT COMPARED: the kept counts are of {kept.get('circumstances')}, these of {now}.")
        print("Keep counts of this machine with `make bench-gate-update` before a change, then run the gate after it.")
    elif complaints := compare(found, kept["counts"]):
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
