"""Small models of the families a scanner meets, each with a batch and a loss.

`build(name)` gives a fresh model in training mode, float32, without dropout, the same weights each time. Optional
libraries are imported where a family needs them; `build` skips the test when one is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB = 97
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MOE = {
    **TEXT,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Family:
    """A model with what it is trained on."""

    model: nn.Module
    batch: dict[str, Any] = field(default_factory=dict)

    def loss(self, model: nn.Module | None = None) -> Tensor:
        """The loss of one forward, of this model or of a wrapper or copy of it."""
        out = (self.model if model is None else model)(**self.batch)
        return out if isinstance(out, Tensor) else out.loss


def build(name: str) -> Family:
    torch.manual_seed(0)
    family = FAMILIES[name]()
    family.model.train()
    return family


def _ids(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _text(kind: str, experts: str | None = None, base: dict[str, Any] = TEXT, **config: Any) -> Callable[[], Family]:
    def builder() -> Family:
        transformers = pytest.importorskip("transformers")
        settings = transformers.AutoConfig.for_model(kind, **{**base, **config})
        options = {"experts_implementation": experts} if experts else {}
        model = transformers.AutoModelForCausalLM.from_config(settings, **options)
        return Family(model, {"input_ids": _ids(), "labels": _ids()})

    return builder


def _gpt2() -> Family:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _text("gpt2", base={}, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dropout)()


def _bert() -> Family:
    transformers = pytest.importorskip("transformers")
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**{**TEXT, "tie_word_embeddings": True, **dropout})
    return Family(transformers.BertForMaskedLM(config), {"input_ids": _ids(), "labels": _ids()})


def _t5() -> Family:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    config = transformers.T5Config(vocab_size=VOCAB, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return Family(transformers.T5ForConditionalGeneration(config), {"input_ids": _ids(), "labels": _ids(2, 5)})


def _vit() -> Family:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**{**TEXT, "image_size": 8, "patch_size": 4, "num_labels": 3})
    batch = {"pixel_values": _noise(2, 3, 8, 8), "labels": torch.tensor([0, 2])}
    return Family(transformers.ViTForImageClassification(config), batch)


class Attention(nn.Module):
    """nn.MultiheadAttention in its four forms: self, cross with one memory, with two, and with other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(32, 4)
        self.split_attn = nn.MultiheadAttention(32, 4, add_bias_kv=True)
        self.wide_attn = nn.MultiheadAttention(32, 4, kdim=24, vdim=40, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, memory: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        x = x + self.self_attn(x, x, x, need_weights=False)[0]
        x = x + self.cross_attn(x, memory, memory)[0]
        x = x + self.split_attn(x, memory, memory.flip(0))[0]
        x = x + self.wide_attn(x, keys, values)[0]
        return self.head(x).square().mean()


def _attention() -> Family:
    batch = {
        "x": _noise(2, 5, 32),
        "memory": _noise(2, 5, 32) * 2,
        "keys": _noise(2, 6, 24),
        "values": _noise(2, 6, 40),
    }
    return Family(Attention(), batch)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).square().mean()


class Normed(nn.Module):
    """Weights that are computed from others, by both generations of torch's helpers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = parametrizations.weight_norm(nn.Embedding(VOCAB, 32))
        self.weight_normed = parametrizations.weight_norm(nn.Linear(32, 48))
        self.spectral = parametrizations.spectral_norm(nn.Linear(48, 32))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(32, 32))
        self.old_style = torch.nn.utils.weight_norm(nn.Linear(32, 24))
        self.plain = nn.Linear(24, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.spectral(self.weight_normed(self.embed(ids)).tanh())
        return self.plain(self.old_style(self.orthogonal(x))).square().mean()


class OddOnes(nn.Module):
    """Modules of torch whose weights are met in unusual ways, and one that is called twice under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 2)
        self.up = nn.ConvTranspose1d(8, 6, 3)
        self.lstm = nn.LSTM(6, 12, batch_first=True)
        self.bilinear = nn.Bilinear(12, 12, 10)
        self.bag = nn.EmbeddingBag(11, 10)
        self.shared = nn.Linear(10, 10)
        self.again = self.shared
        self.norm = nn.LayerNorm((4, 10))
        self.mixer = Mixer()
        self.scale = nn.Parameter(torch.ones(4, 10))
        self.raw = nn.ParameterList([nn.Parameter(torch.randn(10, 10) / 3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.conv(x).flatten(2)).transpose(1, 2)
        h, _ = self.lstm(h)
        h = self.bilinear(h, h) + self.bag(torch.arange(6).reshape(2, 3)).unsqueeze(1)
        h = self.again(self.shared(h)).tanh()[:, :4]
        h = self.mixer(input=self.norm(h) * self.scale) @ self.raw[0]
        return h.square().mean()


class Mixer(nn.Module):
    """A layer of the user's own, called by keyword: one weight is met as `weight @ x`, one is cast before use."""

    def __init__(self) -> None:
        super().__init__()
        self.down = InOut(10, 7)
        self.across = nn.Parameter(torch.randn(9, 4) / 2)
        self.cast = nn.Parameter(torch.randn(10, 7, dtype=torch.float64) / 3)

    def forward(self, input: Tensor) -> Tensor:
        h = (self.across @ self.down(input))[:, :4]
        return nn.functional.linear(h, self.cast.to(torch.float32))


class InOut(nn.Module):
    """A layer of the user's own that stores its weight [in, out] and says so with `in_features`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.kernel = nn.Parameter(torch.randn(in_features, out_features) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel)


def _llama() -> Family:
    return _text("llama")()


def _frozen() -> Family:
    family = _llama()
    for name, parameter in family.model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "embed" not in name)
    return family


def _lora(target: dict[str, Any], base: Callable[[], Family]) -> Callable[[], Family]:
    def builder() -> Family:
        peft = pytest.importorskip("peft")
        family = base()
        config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, **target)
        return Family(peft.get_peft_model(family.model, config), family.batch)

    return builder


def _replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if type(child) is nn.Linear and key != "lm_head":
                setattr(parent, key, make(child))


def _bnb(kind: str) -> Callable[[], Family]:
    def quantise(linear: nn.Linear) -> nn.Module:
        import bitsandbytes as bnb

        options = {"compute_dtype": torch.float32} if kind == "Linear4bit" else {"has_fp16_weights": False}
        new = getattr(bnb.nn, kind)(linear.in_features, linear.out_features, bias=False, **options)
        new.load_state_dict(linear.state_dict())
        return new.to("cpu")

    def builder() -> Family:
        pytest.importorskip("bitsandbytes")
        family = _llama()
        _replace_linears(family.model, quantise)
        return family

    return builder


def _torchao() -> Family:
    quantization = pytest.importorskip("torchao.quantization")
    family = _llama()
    layers = family.model.model.layers
    quantization.quantize_(layers, quantization.Int8WeightOnlyConfig())
    return family


def _deepseek() -> dict[str, Any]:
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    groups = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return {"head_dim": 4, "num_key_value_heads": 4, **ranks, **groups}


_OSS = {"layer_types": ["full_attention", "sliding_attention"]}
_EXPERT_LORA = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}

FAMILIES: dict[str, Callable[[], Family]] = {
    "llama": _llama,
    "llama-tied": _text("llama", tie_word_embeddings=True),
    "qwen3": _text("qwen3"),
    "gpt2": _gpt2,
    "gpt_neox": _text("gpt_neox"),
    "phi3": _text("phi3"),
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "mixtral-grouped_mm": _text("mixtral", "grouped_mm", MOE),
    "mixtral-batched_mm": _text("mixtral", "batched_mm", MOE),
    "mixtral-eager": _text("mixtral", "eager", MOE),
    "qwen3_moe": _text("qwen3_moe", base=MOE),
    "gpt_oss-grouped_mm": _text("gpt_oss", "grouped_mm", MOE, **_OSS),
    "gpt_oss-batched_mm": _text("gpt_oss", "batched_mm", MOE, **_OSS),
    "gpt_oss-eager": _text("gpt_oss", "eager", MOE, **_OSS),
    "deepseek_v3": _text("deepseek_v3", base=MOE, **_deepseek()),
    "llama4": _text("llama4_text", base=MOE, intermediate_size_mlp=64),
    "jetmoe": _text("jetmoe", base=MOE, kv_channels=8),
    "mamba": _text("mamba", state_size=4),
    "attention": _attention,
    "encoder": lambda: Family(Encoder(), {"x": _noise(2, 5, 32)}),
    "weight_norm": lambda: Family(Normed(), {"ids": _ids()}),
    "odd": lambda: Family(OddOnes(), {"x": _noise(2, 3, 4, 4)}),
    "frozen": _frozen,
    "lora": _lora({"target_modules": ["q_proj", "down_proj"]}, _llama),
    "lora-experts": _lora(_EXPERT_LORA, _text("qwen3_moe", base=MOE)),
    "bnb-4bit": _bnb("Linear4bit"),
    "bnb-8bit": _bnb("Linear8bitLt"),
    "torchao-int8": _torchao,
}
