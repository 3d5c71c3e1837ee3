#!/usr/bin/env bash
# Installs the wheel in dist/ into an environment that holds nothing but torch, and uses it there.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
"${PYTHON:-python3}" -m venv "$room/env"
"$room/env/bin/pip" install -q "$(grep '^torch==' "$here/requirements-dev.txt")"
"$room/env/bin/pip" install -q "$here"/dist/pyscan-*.whl
cd "$room"
for isa in baseline ""; do
  PYSCAN_ISA=$isa "$room/env/bin/python" - <<'PY'
import torch, pyscan
from pyscan import _C
x = torch.randn(1000, 513).bfloat16()
torch.testing.assert_close(pyscan.reduce(x)[0], torch.stack([p.double().square().sum() for p in x.split(64, 1)]), rtol=1e-6, atol=0)
import pyscan.kernels
print("wheel works with", _C.isa)
PY
done
"$room/env/bin/pyscan" doctor > doctor.txt || { cat doctor.txt; exit 1; }
# The demo's loop is in the wheel; its libraries are an extra.
"$room/env/bin/python" -c "import pyscan, pathlib; assert (pathlib.Path(pyscan.__file__).parent / 'examples/train.py').exists()"
("$room/env/bin/pyscan" demo 2>&1 || true) | grep -F "pip install 'pyscan[demo]'"
# So is the viewer's page.
"$room/env/bin/python" -c "from pyscan.viewer.server import page, static; assert b'slider' in page() and static('report.js')"
# Reading needs numpy alone.
"$room/env/bin/pip" uninstall -q -y torch triton
"$room/env/bin/python" -c "import pyscan, sys; assert 'torch' not in sys.modules; print('imports without torch')"
