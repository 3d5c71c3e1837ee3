"""Write and run examples/look.ipynb: a scan of a tiny model, looked at with run.heatmap() and run.plot().

`make notebook` calls it. Figures are kept as data without Plotly's script, so that the file stays small.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "look.ipynb"

CELLS = [
    "# Look at a scan\n\nTrain a tiny model with the scanner on, then look at what it recorded.",
    """import tempfile

import torch
from torch import nn

import pyscan

torch.manual_seed(0)


def layer():
    return nn.ModuleDict({"up": nn.Linear(128, 256), "down": nn.Linear(256, 128)})


model = nn.ModuleDict({"embed": nn.Embedding(50, 128), "layers": nn.ModuleList(layer() for _ in range(4))})
head = model["head"] = nn.Linear(128, 50)


def forward(tokens):
    x = model["embed"](tokens)
    for part in model["layers"]:
        x = x + part["down"](torch.relu(part["up"](x)))
    return head(x)""",
    """path = tempfile.mkdtemp() + "/run.mscan"
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
with pyscan.attach(model, path, optimizer=optimizer) as scan:
    for _ in range(200):
        tokens = torch.randint(0, 50, (8, 16))
        loss = nn.functional.cross_entropy(forward(tokens).flatten(0, 1), (3 * tokens + 1).flatten() % 50)
        scan.note(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()""",
    "A run shows itself:",
    "run = pyscan.open(path)\nrun",
    "The whole model at one step, and the sites that moved most. Hover for names and values.",
    'run.heatmap(measure="grad")',
    'run.plot(channel="grad", points=100)',
    "SPS compares each cell with its layer: high is strongly used and already settled.",
    'run.heatmap(measure="sps")',
]


def main() -> None:
    make = {True: nbformat.v4.new_code_cell, False: nbformat.v4.new_markdown_cell}
    is_code = ("import", "path", "run", "def")
    notebook = nbformat.v4.new_notebook(cells=[make[cell.startswith(is_code)](cell) for cell in CELLS])
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "application/vnd.plotly.v1+json" in data:
                data.pop("text/html", None)
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK} ({NOTEBOOK.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
