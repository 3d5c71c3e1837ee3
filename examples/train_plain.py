"""The loop of train.py without pyscan: nothing differs but the lines that say `scan`.

python examples/train_plain.py --steps 500 -o runs/mine
python -m pyscan run examples/train_plain.py --steps 500 -o runs/mine      (scanned all the same)
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model on Python's own sources.")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/train"), help="directory of the run")
    parser.add_argument("--resume", action="store_true", help="go on at the last checkpoint of the run")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps in all")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a micro-batch")
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--lr", type=float, default=5e-4, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is at its highest")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines of text")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=6400)
    parser.add_argument("--corpus-bytes", type=int, default=2_000_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def read_corpus(num_bytes: int) -> list[str]:
    """Source files of the standard library, which is on every machine that has Python."""
    texts, left = [], num_bytes
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_bytes()[: max(left, 0)].decode(errors="ignore"))
        left -= len(texts[-1])
    return texts


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        intermediate_size=64 * math.ceil(args.hidden * 8 / 3 / 64),
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(args.device).train()


def choose_dtype(args: argparse.Namespace) -> torch.dtype:
    """What a GPU multiplies fastest; on a CPU, the full precision."""
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    if args.device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


class Job:
    """Everything a step needs. `parts` is what a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.step = 0
        texts = read_corpus(args.corpus_bytes)
        self.tokenizer = train_tokenizer(texts, args.vocabulary)
        self.data = torch.tensor([token for text in texts for token in self.tokenizer(text)["input_ids"]])
        self.dtype = choose_dtype(args)
        self.model = make_model(args)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.1)
        self.scaler = torch.amp.GradScaler(args.device, enabled=self.dtype == torch.float16)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def batch(self, step: int, micro: int) -> torch.Tensor:
        """Random pieces of the corpus, the same for the same step."""
        chance = torch.Generator().manual_seed(self.args.seed + 1000 * step + micro)
        starts = torch.randint(len(self.data) - self.args.context, (self.args.batch,), generator=chance)
        return torch.stack([self.data[start : start + self.args.context] for start in starts]).to(self.args.device)

    def learning_rate(self, step: int) -> float:
        """Up in a line, then down to a tenth along a cosine."""
        args = self.args
        if step <= args.warmup:
            return args.lr * step / args.warmup
        progress = (step - args.warmup) / max(args.steps - args.warmup, 1)
        return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def save(self) -> None:
        """Put down a checkpoint; a process that dies in the middle leaves the one before."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({"step": self.step, "parts": state}, self.args.output / "checkpoint.new")
        os.replace(self.args.output / "checkpoint.new", self.args.output / "checkpoint.pt")

    def resume(self) -> None:
        checkpoint = torch.load(self.args.output / "checkpoint.pt", map_location=self.args.device)
        self.step = checkpoint["step"]
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint["parts"][name])

    def save_model(self) -> None:
        self.model.save_pretrained(self.args.output / "model")
        self.tokenizer.save_pretrained(self.args.output / "model")


def train_step(job: Job) -> float:
    """One optimizer step over several micro-batches; gives the mean loss."""
    args, losses = job.args, []
    for group in job.optimizer.param_groups:
        group["lr"] = job.learning_rate(job.step)
    for micro in range(args.accumulate):
        ids = job.batch(job.step, micro)
        with torch.autocast(args.device, job.dtype, enabled=job.dtype != torch.float32):
            loss = job.model(input_ids=ids, labels=ids).loss
        job.scaler.scale(loss / args.accumulate).backward()
        losses.append(loss.detach())
    job.scaler.unscale_(job.optimizer)
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), args.clip)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).mean().item()


def train(job: Job) -> None:
    args = job.args
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns) as bar:
        task = bar.add_task("starting", total=args.steps, completed=job.step)
        num_tokens, started = 0, time.perf_counter()
        while job.step < args.steps:
            job.step += 1
            loss = train_step(job)
            num_tokens += args.accumulate * args.batch * args.context
            rate = num_tokens / (time.perf_counter() - started)
            bar.update(task, advance=1, description=f"loss {loss:.3f} · {rate:,.0f} tokens/s")
            if job.step % args.log_every == 0:
                bar.console.print(f"step {job.step:>5}   loss {loss:.3f}   {rate:,.0f} tokens/s", highlight=False)
            if job.step % args.save_every == 0 or job.step == args.steps:
                job.save()


def main() -> None:
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    job = Job(args)
    if args.resume:
        job.resume()
    train(job)
    job.save_model()
    print(f"model  {args.output / 'model'}")


if __name__ == "__main__":
    main()
