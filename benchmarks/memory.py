"""How much memory this process has had resident at most.

`getrusage` would count what its parent had before it became this program; the kernel's own high-water mark does not.
"""

from __future__ import annotations

from pathlib import Path


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
