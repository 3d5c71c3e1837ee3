"""A small language model trained with Accelerate, and scanned: `python examples/accelerate_train.py run.mscan`.

Accelerate needs nothing of its own: attach after `prepare`, and let its checkpoints keep the place of the scan.
"""

import argparse
from itertools import cycle, islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import pyscan


def make_model(hidden: int = 128) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def make_data(num_batches: int, batch_size: int = 4, length: int = 64) -> DataLoader:
    """Bytes of a text that is on every machine, in the order they stand there."""
    text = islice(cycle(Path(argparse.__file__).read_bytes()), num_batches * batch_size * length)
    return DataLoader(torch.tensor(list(text)).view(-1, length), batch_size=batch_size)


def train(path: str, *, steps: int = 50, accumulation: int = 2, hidden: int = 128) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = make_model(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, make_data(steps * accumulation))
    model.train()
    with pyscan.attach(model, path, optimizer=optimizer) as scan:
        accelerator.register_for_checkpointing(scan)  # save_state() keeps its step, load_state() goes on from there
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.3f}, {scan.overhead:.1%} of the time spent scanning: pyscan show {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the .mscan file to write")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    train(arguments.path, steps=arguments.steps)
