"""What users may rely on: the public names, reading without torch, and that imports between stages point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pyscan

ROOT = Path(pyscan.__file__).parent
DATA = Path(__file__).parent / "data"


def test_the_public_names_are_these() -> None:
    assert sorted(pyscan.__all__) == [
        "ABSENT",
        "Run",
        "ScanError",
        "ScanFormatError",
        "Scanner",
        "Watch",
        "__version__",
        "attach",
        "check_grad_flow",
        "check_init",
        "is_absent",
        "open",
        "reduce",
        "trace_nonfinite",
    ]
    for name in pyscan.__all__:
        assert getattr(pyscan, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pyscan.nothing


READ = """
import sys
sys.modules["torch"] = None  # any import of it fails
import pyscan
run = pyscan.open(sys.argv[1])
assert len(run.steps) and run.sites
run.act(run.sites[0].name)
print("read", len(run.steps), "rows")
"""


@pytest.mark.parametrize("file", sorted(DATA.glob("*.mscan")), ids=lambda path: path.name)
def test_reading_needs_no_torch(file: Path) -> None:
    run = subprocess.run([sys.executable, "-c", READ, file], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("read")


def imports_of(path: Path) -> set[str]:
    """Modules of pyscan, and outside libraries, that a file imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "pyscan":
                found.update(f"pyscan.{alias.name}" for alias in node.names)
    return found


# The writing side knows torch; the reading side does not, nor the other way round: they meet in schema and codecs.
READING = ["reader", "run", "frames", "timeline", "journal", "version1", "version2", "ranks", "rewrite", "convert"]
READING += ["check", "codecs", "errors", "format", "schema", "payloads", "source", "analysis", "compare", "names"]
READING += ["watch", "alarms", "levels", "first_bad", "health", "grad_check"]
READING += [f"integrations/{name}" for name in ("curves", "heatmap", "follow", "tensorboard", "wandb")]
WRITING = ["scanner", "hooks", "capture", "gradients", "accumulate", "forward", "steps", "functional", "sites"]
WRITING += ["closing", "engines", "device", "device_buffer", "device_gradients", "flush", "groups", "results"]
WRITING += ["lookout", "attached", "flow", "case", "causes", "causes_forward", "graph", "tape", "preserve", "parallel"]
WRITING += ["init_check", "nonfinite", "grad_stats", "flow_table", "checkpoint", "figures"]
WRITING += [f"integrations/{name}" for name in ("session", "transformers", "lightning")]
# What starts a program or reads its settings must not bring torch along: the program may want to set it up first.
STARTING = ["settings", "script", "autoattach", "commands/run", "commands/demo"]


@pytest.mark.parametrize("module", READING)
def test_the_reading_side_imports_neither_torch_nor_the_writing_side(module: str) -> None:
    imports = imports_of(ROOT / f"{module}.py")
    assert not [name for name in imports if name.split(".")[0] in ("torch", "triton", "transformers")]
    assert not imports & {f"pyscan.{name}" for name in [*WRITING, "engine", "_C", "writer"]}


@pytest.mark.parametrize("module", WRITING)
def test_the_writing_side_does_not_read(module: str) -> None:
    assert not imports_of(ROOT / f"{module}.py") & {"pyscan.reader", "pyscan.run", "pyscan.frames", "pyscan.timeline"}


@pytest.mark.parametrize("module", STARTING)
def test_what_starts_a_program_imports_no_library(module: str) -> None:
    imports = imports_of(ROOT / f"{module}.py")
    assert not [name for name in imports if name.split(".")[0] in ("torch", "numpy", "rich", "transformers")]
    assert not imports & {f"pyscan.{name}" for name in [*WRITING, "text", "watch", "writer", "demo"]}


def test_each_stage_knows_only_what_is_below_it() -> None:
    assert not {name for name in imports_of(ROOT / "hooks.py") if "accumulate" in name or "capture" in name}
    assert not {name for name in imports_of(ROOT / "capture.py") if "writer" in name or "scanner" in name}
    assert not {name for name in imports_of(ROOT / "writer.py") if "torch" in name or "accumulate" in name}
    for path in [*ROOT.glob("*.py"), *(ROOT / "commands").glob("*.py"), *(ROOT / "integrations").glob("*.py")]:
        if path.name not in ("__main__.py", "__init__.py", "cli.py"):
            assert "pyscan.cli" not in imports_of(path), path


# Tables before kernels, kernels before launches; nothing here knows the scanner, and planning needs no triton.
KERNELS = {
    "layout": set(),
    "slots": {"numpy"},
    "cut": {"pyscan.kernels.layout", "pyscan.kernels.slots"},
    "plan": {"numpy", "pyscan.kernels.cut", "pyscan.kernels.layout", "pyscan.kernels.slots"},
    "tiles": {"triton", "pyscan.kernels.layout"},
    "merge": {"triton", "pyscan.kernels.layout", "pyscan.kernels.slots", "pyscan.kernels.tiles"},
    "launch": {"numpy", "torch", "triton", "pyscan.kernels", "pyscan.kernels.layout", "pyscan.kernels.plan"},
}


@pytest.mark.parametrize("module", KERNELS)
def test_kernels_know_only_what_is_below_them(module: str) -> None:
    standard = {"__future__", "collections", "contextlib", "enum", "itertools", "typing"}
    imports = imports_of(ROOT / "kernels" / f"{module}.py")
    names = {name if name.startswith("pyscan") else name.split(".")[0] for name in imports}
    assert names - standard <= KERNELS[module]
    assert {path.stem for path in (ROOT / "kernels").glob("*.py")} == {"__init__", *KERNELS}
