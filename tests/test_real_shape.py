"""The real shape of Qwen3-1.7B with random weights: every weight is scanned, and what that costs is said."""

import statistics
import time
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from torch import nn

import pyscan

NUM_TOKENS = 32
NUM_ROUNDS = 3
NEEDED = 18 << 30  # weights and gradients are 6.9 GB each; the rest is room to work


def qwen3() -> nn.Module:
    """Built without initialisation, then filled with copies of one block of noise, which is cheap to make."""
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)  # its buffers are computed, not loaded
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        if parameter.ndim == 1:
            flat.fill_(1.0)
            continue
        for begin in range(0, flat.numel(), noise.numel()):
            part = flat[begin : begin + noise.numel()]
            part.copy_(noise[: part.numel()])
    return model.train()


def reset_high_water() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def high_water() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def timed_pass(model: nn.Module, ids: torch.Tensor) -> tuple[float, int]:
    """Seconds of a forward and backward, and the peak resident size in it."""
    model.zero_grad(set_to_none=False)  # the gradients stay where they are: no pass pays for fresh pages
    reset_high_water()
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - start, high_water()


@pytest.mark.slow
def test_every_weight_of_qwen3_is_scanned_at_its_real_shape() -> None:
    available = psutil.virtual_memory().available
    if available < NEEDED:
        pytest.skip(f"needs {NEEDED / 2**30:.0f} GiB of free memory, there are {available / 2**30:.1f}")
    model = qwen3()
    ids = torch.randint(151936, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()  # gradients are allocated here
    bare, scanned = [], []
    for _ in range(NUM_ROUNDS):
        bare.append(timed_pass(model, ids))
        with pyscan.attach(model) as scan:
            scanned.append(timed_pass(model, ids))
            start = time.perf_counter()
            scan.step()
            closing = time.perf_counter() - start
        stats = scan.latest()["param_stats"]
    names = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert set(stats) == names
    assert len(names) == 7 * 28 + 2  # 196 Linears in the layers, the embedding, the head tied to it
    for name, site in stats.items():
        assert site["activation_norm"] > 0, name
        assert site["grad_norm"] > 0, name
        parameter = model.get_parameter(name)
        assert len(site["blocks"]) == -(-parameter.shape[1] // 64), name
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        want = model.get_parameter(name).grad.norm(dim=1).double().norm().item()
        assert stats[name]["grad_norm"] == pytest.approx(want, rel=1e-5)
    ratios = [with_scan[0] / without[0] for with_scan, without in zip(scanned, bare, strict=True)]
    extra = [with_scan[1] - without[1] for with_scan, without in zip(scanned, bare, strict=True)]
    print(
        f"\n{len(names)} sites, {scan.buffer.num_cells} cells, {torch.get_num_threads()} threads, {NUM_TOKENS} tokens; "
        f"forward and backward bare {statistics.median(s for s, _ in bare):.2f} s, scanned "
        f"{statistics.median(s for s, _ in scanned):.2f} s, ratios {', '.join(f'{r:.3f}' for r in ratios)} "
        f"(median x{statistics.median(ratios):.3f}), closing the row {1e3 * closing:.1f} ms; peak resident size bare "
        f"{bare[-1][1] / 2**20:.0f} MiB, extra {', '.join(f'{e / 2**20:.1f}' for e in extra)} MiB"
    )
    assert statistics.median(extra) < 0.01 * bare[-1][1]
