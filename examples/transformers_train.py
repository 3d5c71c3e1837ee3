"""A small language model trained with the transformers Trainer, and scanned.

`python examples/transformers_train.py run.mscan --output out`; run it again with `--resume` to continue from its last
checkpoint: the scan continues with it.
"""

import argparse
from itertools import cycle, islice
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pyscan.integrations.transformers import ScanCallback


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


def make_data(num_sequences: int, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Bytes of a text that is on every machine, in the order they stand there."""
    text = islice(cycle(Path(argparse.__file__).read_bytes()), num_sequences * length)
    return [{"input_ids": ids, "labels": ids} for ids in torch.tensor(list(text)).view(-1, length)]


def train(
    path: str, output: str, *, steps: int = 50, accumulation: int = 2, hidden: int = 128, resume: bool = False
) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=10,
        save_steps=25,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        make_model(hidden),
        arguments,
        train_dataset=make_data(4 * steps * accumulation),
        callbacks=[ScanCallback(path)],  # the whole change
    )
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the .mscan file to write")
    parser.add_argument("--output", default="out", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    given = parser.parse_args()
    train(given.path, given.output, steps=given.steps, resume=given.resume)
