"""The model and the tokenizer of a corpus scan: loaded, in evaluation mode, on its device.

Receives a directory or a name of the hub; hands on both, or says what is missing. A quantised model is refused before
its weights are read: they have no gradient, and a scan of it would show zeros without a word.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pyscan.corpus_tokens import CorpusError
from pyscan.extras import need
from pyscan.weights import quantised

DTYPES = ("auto", "float32", "bfloat16", "float16")
_REMEDY = "load the model it was made from, unquantised, in bf16 (--model ORIGINAL --dtype bfloat16)"


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any
    max_length: int | None  # what the model was made for


def load(name: str, *, dtype: str = "auto", device: str = "auto") -> Loaded:
    """The causal language model of a directory, or of a name that transformers knows how to find."""
    transformers = need("transformers", "scan")
    transformers.utils.logging.disable_progress_bar()
    place = choose_device(device)
    if Path(name).is_dir():
        _check_directory(Path(name))
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:  # which no name of the hub does
        raise CorpusError(f"there is no directory {name!r}: name the one that save_pretrained wrote")
    config = _loaded(transformers.AutoConfig, name, "config.json")
    refuse_quantised(name, config)
    tokenizer = _loaded(transformers.AutoTokenizer, name, "the tokenizer")
    chosen = choose_dtype(dtype, place)
    model = _loaded(transformers.AutoModelForCausalLM, name, "the weights", dtype=chosen).to(place).eval()
    for weight, parameter in model.named_parameters():
        if stored := quantised(parameter):
            raise CorpusError(f"{weight} of {name} is {stored}): it has no gradient; {_REMEDY}")
    length = getattr(config, "max_position_embeddings", None)
    return Loaded(model, tokenizer, length if isinstance(length, int) else None)


def choose_device(device: str) -> torch.device:
    """Where to run; of several processes on a machine each has a GPU of its own."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it by itself, else fp32."""
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if device.type == "cpu":
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def refuse_quantised(name: str, config: Any) -> None:
    """Raise if the model is stored quantised, with the reason: gradients of such weights do not exist."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    told = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(told.get("quant_method", "quantised")).rpartition(".")[2].lower()
    bits = told.get("bits") or (4 if told.get("load_in_4bit") else 8 if told.get("load_in_8bit") else None)
    kind = f"in {bits}-bit ({method})" if bits else f"quantised ({method})"
    raise CorpusError(
        f"{name} is stored {kind}: such weights have requires_grad=False, no gradient ever reaches them, and a scan "
        f"would show none; {_REMEDY}"
    )


def fingerprint(model: torch.nn.Module) -> str:
    """A mark of the weights, from a sample of each: other weights of the same shape have another one."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(len(flat) // 256, 1)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:32]


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        inside = sorted(entry.name for entry in path.iterdir())[:5]
        raise CorpusError(
            f"{path} is not a model: it has no config.json (it holds {', '.join(inside) or 'nothing'}); name the "
            "directory that save_pretrained wrote, such as runs/demo/model"
        )
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise CorpusError(f"{path} has a config.json and no weights: there is no *.safetensors in it")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise CorpusError(f"{path} has no tokenizer: save it there too, with tokenizer.save_pretrained({str(path)!r})")


def _loaded(kind: Any, name: str, what: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # every library below has errors of its own kind
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(f"{what} of the model {name!r} cannot be loaded: {reason}") from error
