"""The inventory of a model names every weight of two or more dimensions, and says how each is seen."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from pyscan.sites import Inventory, Site, find_sites
from tests import families

# What each family holds: a name, with {a,b} for alternatives and {0-3} for a range -> kind and how it is observed.
Expected = dict[str, str]

LLAMA_LAYERS: Expected = {
    "model.layers.{0-1}.self_attn.{q,k,v,o}_proj.weight": "linear module_input",
    "model.layers.{0-1}.mlp.{gate,up,down}_proj.weight": "linear module_input",
}
ENDS: Expected = {"model.embed_tokens.weight": "embedding lookup", "lm_head.weight": "linear module_input"}
LLAMA: Expected = {**ENDS, **LLAMA_LAYERS}
ATTENTION: Expected = {"model.layers.{0-1}.self_attn.{q,k,v,o}_proj.weight": "linear module_input"}
EXPERTS: Expected = {"model.layers.{0-1}.mlp.experts.{gate_up,down}_proj[{0-3}]": "expert functional"}
MIXTRAL: Expected = {**ENDS, **ATTENTION, **EXPERTS, "model.layers.{0-1}.mlp.gate.weight": "router module_input"}
GPT_OSS: Expected = {**ENDS, **ATTENTION, **EXPERTS, "model.layers.{0-1}.mlp.router.weight": "router module_input"}
QUANTISED: Expected = {**ENDS, **dict.fromkeys(LLAMA_LAYERS, "quantized module_input")}
PEFT = "base_model.model."
PEFT_EXPERTS = PEFT + "model.layers.{0-1}.mlp.experts."

EXPECTED: dict[str, Expected] = {
    "llama": LLAMA,
    "llama-tied": LLAMA,
    "frozen": LLAMA,
    "qwen3": LLAMA,
    "gpt2": {
        "transformer.{wte,wpe}.weight": "embedding lookup",
        "transformer.h.{0-1}.{attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj}.weight": "conv1d module_input",
        "lm_head.weight": "linear module_input",
    },
    "gpt_neox": {
        "gpt_neox.embed_in.weight": "embedding lookup",
        "gpt_neox.layers.{0-1}.attention.{query_key_value,dense}.weight": "linear module_input",
        "gpt_neox.layers.{0-1}.mlp.{dense_h_to_4h,dense_4h_to_h}.weight": "linear module_input",
        "lm_head.weight": "linear module_input",
    },
    "phi3": {
        **ENDS,
        "model.layers.{0-1}.self_attn.{qkv_proj,o_proj}.weight": "linear module_input",
        "model.layers.{0-1}.mlp.{gate_up_proj,down_proj}.weight": "linear module_input",
    },
    "bert": {
        "bert.embeddings.{word,position,token_type}_embeddings.weight": "embedding lookup",
        "bert.encoder.layer.{0-1}.attention.{self.query,self.key,self.value}.weight": "linear module_input",
        "bert.encoder.layer.{0-1}.attention.output.dense.weight": "linear module_input",
        "bert.encoder.layer.{0-1}.{intermediate,output}.dense.weight": "linear module_input",
        "cls.predictions.{transform.dense,decoder}.weight": "linear module_input",
    },
    "t5": {
        "{shared,encoder.embed_tokens,decoder.embed_tokens}.weight": "embedding lookup",
        "{encoder,decoder}.block.{0-1}.layer.0.SelfAttention.{q,k,v,o}.weight": "linear module_input",
        "{encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embedding lookup",
        "encoder.block.{0-1}.layer.1.DenseReluDense.{wi,wo}.weight": "linear module_input",
        "decoder.block.{0-1}.layer.1.EncDecAttention.{q,k,v,o}.weight": "linear module_input",
        "decoder.block.{0-1}.layer.2.DenseReluDense.{wi,wo}.weight": "linear module_input",
        "lm_head.weight": "linear module_input",
    },
    "vit": {
        "vit.embeddings.patch_embeddings.projection.weight": "conv none",
        "vit.layers.{0-1}.attention.{q,k,v,o}_proj.weight": "linear module_input",
        "vit.layers.{0-1}.mlp.{fc1,fc2}.weight": "linear module_input",
        "classifier.weight": "linear module_input",
    },
    "mixtral-grouped_mm": MIXTRAL,
    "mixtral-batched_mm": MIXTRAL,
    "mixtral-eager": MIXTRAL,
    "qwen3_moe": MIXTRAL,
    "gpt_oss-grouped_mm": GPT_OSS,
    "gpt_oss-batched_mm": GPT_OSS,
    "gpt_oss-eager": GPT_OSS,
    "deepseek_v3": {
        **ENDS,
        "model.layers.{0-1}.self_attn.{q_a,q_b,kv_b,o}_proj.weight": "linear module_input",
        "model.layers.{0-1}.self_attn.kv_a_proj_with_mqa.weight": "linear module_input",
        "model.layers.0.mlp.{gate,up,down}_proj.weight": "linear module_input",
        "model.layers.1.mlp.experts.{gate_up,down}_proj[{0-3}]": "expert functional",
        "model.layers.1.mlp.gate.weight": "router module_input",
        "model.layers.1.mlp.shared_experts.{gate,up,down}_proj.weight": "linear module_input",
    },
    "llama4": {
        **ENDS,
        **ATTENTION,
        "model.layers.{0-1}.feed_forward.experts.{gate_up,down}_proj[{0-3}]": "expert functional",
        "model.layers.{0-1}.feed_forward.router.weight": "router module_input",
        "model.layers.{0-1}.feed_forward.shared_expert.{gate,up,down}_proj.weight": "linear module_input",
    },
    "jetmoe": {
        **ENDS,
        "model.layers.{0-1}.{mlp,self_attention.experts}.{input,output}_linear.weight[{0-3}]": "expert functional",
        "model.layers.{0-1}.{mlp,self_attention.experts}.router.layer.weight": "linear module_input",
        "model.layers.{0-1}.self_attention.kv_proj.weight": "linear module_input",
    },
    "mamba": {
        "backbone.embeddings.weight": "embedding lookup",
        "backbone.layers.{0-1}.mixer.{in_proj,x_proj,out_proj}.weight": "linear module_input",
        "backbone.layers.{0-1}.mixer.dt_proj.weight": "linear functional",
        "backbone.layers.{0-1}.mixer.conv1d.weight": "conv none",
        "lm_head.weight": "linear module_input",
    },
    "attention": {
        "{self,cross,split}_attn.in_proj_weight": "mha_in functional",
        "wide_attn.{q,k,v}_proj_weight": "mha_in functional",
        "{self,cross,split,wide}_attn.out_proj.weight": "mha_out functional",
        "head.weight": "linear module_input",
    },
    "encoder": {
        "encoder.layers.{0-1}.self_attn.in_proj_weight": "mha_in functional",
        "encoder.layers.{0-1}.self_attn.out_proj.weight": "mha_out functional",
        "encoder.layers.{0-1}.linear{1,2}.weight": "linear module_input",
    },
    "weight_norm": {
        "embed.parametrizations.weight.original1": "parametrized lookup",
        "weight_normed.parametrizations.weight.original1": "parametrized module_input",
        "{spectral,orthogonal}.parametrizations.weight.original": "parametrized module_input",
        "old_style.weight_v": "parametrized module_input",
        "plain.weight": "linear module_input",
    },
    "odd": {
        "{conv,up}.weight": "conv none",
        "lstm.weight_{ih,hh}_l0": "other none",
        "bilinear.weight": "other none",
        "bag.weight": "embedding none",
        "shared.weight": "linear module_input",
        "mixer.{down.kernel,across,cast}": "other functional",
        "raw.0": "other none",
    },
    "lora": {
        PEFT + "model.embed_tokens.weight": "embedding lookup",
        PEFT + "lm_head.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.{self_attn.k_proj,self_attn.v_proj,self_attn.o_proj}.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.mlp.{gate,up}_proj.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.{self_attn.q,mlp.down}_proj.base_layer.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.{self_attn.q,mlp.down}_proj.lora_{A,B}.default.weight": "linear module_input",
    },
    "lora-experts": {
        PEFT + "model.embed_tokens.weight": "embedding lookup",
        PEFT + "lm_head.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.self_attn.{k,v,o}_proj.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.self_attn.q_proj.base_layer.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.self_attn.q_proj.lora_{A,B}.default.weight": "linear module_input",
        PEFT + "model.layers.{0-1}.mlp.gate.weight": "router module_input",
        PEFT_EXPERTS + "base_layer.base_layer.{gate_up,down}_proj[{0-3}]": "expert functional",
        PEFT_EXPERTS + "lora_{A,B}.default.weight": "linear none",
        PEFT_EXPERTS + "base_layer.lora_{A,B}.default.weight": "linear none",
    },
    "bnb-4bit": QUANTISED,
    "bnb-8bit": QUANTISED,
    "torchao-int8": QUANTISED,
}


def expand(pattern: str) -> Iterator[str]:
    """All names of a pattern: a{b,c}d{0-1} -> abd0, abd1, acd0, acd1."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [[part] if i % 2 == 0 else _choices(part) for i, part in enumerate(parts)]
    yield from ("".join(parts) for parts in itertools.product(*choices))


def _choices(part: str) -> list[str]:
    bounds = re.fullmatch(r"(\d+)-(\d+)", part)
    return [str(n) for n in range(int(bounds[1]), int(bounds[2]) + 1)] if bounds else part.split(",")


def by_name(inventory: Inventory) -> dict[str, Site]:
    return {site.name: site for site in inventory.sites}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_family_has_its_expected_sites() -> None:
    assert EXPECTED.keys() == families.FAMILIES.keys()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_full_set_of_sites(name: str) -> None:
    inventory = find_sites(families.build(name).model)
    found = {site.name: f"{site.kind} {site.observe}" for site in inventory.sites}
    assert len(found) == len(inventory.sites)
    assert found == {site: what for pattern, what in EXPECTED[name].items() for site in expand(pattern)}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_coverage_names_every_parameter_of_two_or_more_dimensions(name: str) -> None:
    model = families.build(name).model
    inventory = find_sites(model)
    assert inventory.coverage.keys() == {n for n, p in model.named_parameters(remove_duplicate=False) if p.ndim >= 2}
    full = {s.name.partition("[")[0] for s in inventory.sites if s.trainable and s.observe != "none"}
    assert {n for n, reason in inventory.coverage.items() if reason == "scanned"} == full
    for site in inventory.sites:
        complete = site.trainable and site.observe != "none"
        assert bool(site.note) == (not complete), site.name
        assert not site.note or (site.note.startswith(f"'{site.name.partition('[')[0]}'") and site.note.endswith("."))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_gradient_reshaped_by_its_site_has_the_shape_it_says(name: str) -> None:
    for site in find_sites(families.build(name).model, block=7).sites:
        assert site.num_blocks == (1 if site.expert is not None else -(-site.shape[1] // 7)), site.name
        if site.parameter is not None:
            stored = site.shape if site.in_axis == 1 else site.shape[::-1]
            assert tuple(site.matrix(site.parameter).shape) == stored, site.name


@pytest.mark.parametrize(
    ("family", "name", "shape", "in_axis"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight", (32, 64), 1),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", (96, 32), 0),
        ("mixtral-eager", "model.layers.0.mlp.experts.gate_up_proj[0]", (128, 32), 1),
        ("gpt_oss-eager", "model.layers.0.mlp.experts.gate_up_proj[3]", (128, 32), 0),
        ("gpt_oss-eager", "model.layers.0.mlp.experts.down_proj[3]", (32, 64), 0),
        ("llama4", "model.layers.1.feed_forward.experts.down_proj[2]", (32, 64), 0),
        ("llama-tied", "lm_head.weight", (97, 32), 1),
        ("llama-tied", "model.embed_tokens.weight", (97, 32), 1),
        ("vit", "vit.embeddings.patch_embeddings.projection.weight", (32, 48), 1),
        ("odd", "up.weight", (18, 8), 0),
        ("odd", "mixer.down.kernel", (7, 10), 0),
        ("odd", "bilinear.weight", (10, 144), 1),
        ("attention", "wide_attn.v_proj_weight", (32, 40), 1),
    ],
)
def test_shape_is_out_by_in_and_the_input_axis_is_where_it_is_stored(
    family: str, name: str, shape: tuple[int, int], in_axis: int
) -> None:
    site = by_name(find_sites(families.build(family).model))[name]
    assert (site.shape, site.in_axis) == (shape, in_axis)


@pytest.mark.parametrize(
    ("block", "rows", "expert_blocks", "linear", "expert"),
    [
        (64, False, False, (1, 0), (1, 0)),
        (16, False, False, (2, 0), (1, 0)),
        (16, True, False, (2, 1), (1, 1)),
        (10, True, True, (4, 2), (4, 13)),
        (0, True, True, (1, 1), (1, 1)),
        (1, False, True, (32, 0), (32, 0)),
    ],
)
def test_blocks_run_along_the_input_and_rows_along_the_output(
    block: int, rows: bool, expert_blocks: bool, linear: tuple[int, int], expert: tuple[int, int]
) -> None:
    model = families.build("mixtral-eager").model
    sites = by_name(find_sites(model, block=block, rows=rows, expert_blocks=expert_blocks))
    for name, counts in (("self_attn.k_proj.weight", linear), ("mlp.experts.gate_up_proj[3]", expert)):
        site = sites[f"model.layers.1.{name}"]
        assert (site.num_blocks, site.num_row_blocks) == counts, name


def test_tied_weights_are_two_sites_of_one_parameter() -> None:
    sites = by_name(find_sites(families.build("llama-tied").model))
    head, embedding = sites["lm_head.weight"], sites["model.embed_tokens.weight"]
    assert head.parameter is embedding.parameter
    assert (head.tied_to, embedding.tied_to) == ("model.embed_tokens.weight", None)
    alone = by_name(find_sites(families.build("llama-tied").model, exclude="embed"))
    assert alone["lm_head.weight"].tied_to is None


def test_frozen_weights_are_recorded_by_their_input_only() -> None:
    inventory = find_sites(families.build("frozen").model)
    name = "model.layers.0.self_attn.q_proj.weight"
    site = by_name(inventory)[name]
    assert not site.trainable
    assert site.note == f"'{name}' is frozen (requires_grad=False): recording its input activation only."
    assert inventory.coverage[name] == "activation only: frozen (requires_grad=False)"


def test_a_frozen_weight_without_observed_input_is_no_site() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    inventory = find_sites(model)
    assert by_name(inventory).keys() == {"1.weight"}
    assert inventory.coverage["0.weight"].startswith("frozen (requires_grad=False), and its input is not observed")


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("bnb-4bit", "is 4-bit (bitsandbytes Params4bit, stored 512x1 uint8, logical 32x32): it has no gradient; scan"),
        ("bnb-8bit", "is 8-bit (bitsandbytes Int8Params, stored 32x32 int8, logical 32x32): it has no gradient; scan"),
        ("torchao-int8", "is quantised (torchao Int8Tensor, stored 32x32, logical 32x32): it has no gradient; scan"),
    ],
)
def test_quantised_weights_keep_their_logical_shape_and_say_what_to_scan(family: str, sentence: str) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    site = by_name(find_sites(families.build(family).model))[name]
    assert site.note == f"'{name}' {sentence} its LoRA matrices."
    assert (site.parameter, site.shape, site.trainable) == (None, (32, 32), False)
    assert site.dtype == {"bnb-4bit": "fp4", "bnb-8bit": "int8", "torchao-int8": "float32"}[family]


def test_float8_training_weights_are_ordinary() -> None:
    float8 = pytest.importorskip("torchao.float8")
    model = nn.Sequential(nn.Linear(64, 48))
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    (site,) = find_sites(model).sites
    assert (site.kind, site.trainable, site.shape) == ("linear", True, (48, 64))


@pytest.mark.parametrize("kernel", ["deepgemm", "sonicmoe"])
def test_experts_inside_a_kernel_say_which_implementation_to_use(kernel: str) -> None:
    model = families.build("mixtral-eager").model
    model.config._experts_implementation = kernel
    inventory = find_sites(model)
    site = by_name(inventory)["model.layers.0.mlp.experts.down_proj[2]"]
    assert site.observe == "none"
    remedy = f"experts run in '{kernel}': the input is inside the kernel; use experts_implementation='grouped_mm'"
    assert remedy in site.note
    assert remedy in inventory.coverage["model.layers.0.mlp.experts.down_proj"]


def test_a_parametrised_weight_lists_what_it_is_computed_from() -> None:
    model = families.build("weight_norm").model
    state = {key: value.clone() for key, value in model.state_dict().items()}
    sites = by_name(find_sites(model))
    site = sites["weight_normed.parametrizations.weight.original1"]
    assert [tuple(p.shape) for p in site.originals] == [(48, 1), (48, 32)]
    assert site.parameter is model.weight_normed.parametrizations.weight.original1
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()), "spectral_norm took a step"


def test_a_parametrised_attention_weight_is_gradient_only() -> None:
    attention = parametrizations.weight_norm(nn.MultiheadAttention(8, 2), name="in_proj_weight")
    inventory = find_sites(attention)
    site = by_name(inventory)["parametrizations.in_proj_weight.original1"]
    assert (site.kind, site.observe) == ("parametrized", "none")
    assert inventory.coverage[site.name].startswith("gradient only")


class Holder(nn.Module):
    """A model whose own child is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 4))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        lambda model: nn.DataParallel(model),
        lambda model: torch.compile(model),
        lambda model: torch.compile(nn.DataParallel(model)),
        lambda model: checkpoint_wrapper(model),
    ],
)
def test_names_are_those_of_the_bare_model(wrap: object) -> None:
    model = Holder()
    model.module[0] = checkpoint_wrapper(model.module[0])
    inventory = find_sites(wrap(model))
    assert [site.name for site in inventory.sites] == ["module.0.weight"]
    assert list(inventory.coverage) == ["module.0.weight"]


def test_include_and_exclude_search_parameter_names() -> None:
    model = families.build("mixtral-eager").model
    inventory = find_sites(model, include=[r"layers\.0\.", "lm_head"], exclude="experts.gate")
    names = {re.sub(r"\[\d\]", "", site.name) for site in inventory.sites}
    assert names == {
        *expand("model.layers.0.self_attn.{q,k,v,o}_proj.weight"),
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.down_proj",
        "lm_head.weight",
    }
    assert inventory.coverage["model.embed_tokens.weight"] == "excluded: no include pattern matches"
    assert inventory.coverage["model.layers.0.mlp.experts.gate_up_proj"].startswith(
        "excluded: exclude pattern 'experts."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "("}, r"include must be a regular expression, got '\('"),
        ({"exclude": ["ok", 3]}, "exclude must be a regular expression, got 3"),
        ({"block": -1}, r"block must be >= 0 \(0: whole tensor\), got -1"),
        ({"include": "nowhere"}, r"include=\['nowhere'\] leave none of 1 weights; the first are 0.weight"),
        ({"exclude": "weight"}, r"exclude=\['weight'\] leave none of 1 weights"),
    ],
)
def test_wrong_options_are_refused_with_the_rule_and_the_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_sites(nn.Sequential(nn.Linear(3, 3)), **options)


def test_a_model_without_weights_says_what_it_holds_instead() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.PReLU(), nn.ReLU())
    with pytest.raises(ValueError, match="no weight matrix found in Sequential: it holds 2 BatchNorm1d, 1 PReLU"):
        find_sites(model)
    with pytest.raises(ValueError, match="no module with parameters"):
        find_sites(nn.ReLU())


def test_a_lazy_weight_asks_for_one_forward_first() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' of LazyLinear has no shape yet: run one forward first"):
        find_sites(model)
    model(torch.randn(2, 5))
    assert find_sites(model).sites[0].shape == (3, 5)


def test_transformers_is_not_imported_to_find_its_layers() -> None:
    import subprocess

    code = (
        "import sys, torch, pyscan.functional; from pyscan.sites import find_sites; "
        "find_sites(torch.nn.Linear(2, 2)); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
