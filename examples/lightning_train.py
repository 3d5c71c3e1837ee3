"""A small language model trained with Lightning, and scanned: `python examples/lightning_train.py run.mscan`."""

import argparse
from itertools import cycle, islice
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from pyscan.integrations.lightning import ScanCallback


class LanguageModel(pl.LightningModule):
    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_data(num_batches: int, batch_size: int = 4, length: int = 64) -> DataLoader:
    """Bytes of a text that is on every machine, in the order they stand there."""
    text = islice(cycle(Path(argparse.__file__).read_bytes()), num_batches * batch_size * length)
    return DataLoader(torch.tensor(list(text)).view(-1, length), batch_size=batch_size)


def train(path: str, *, steps: int = 50, accumulation: int = 2, hidden: int = 128, **options: object) -> None:
    torch.manual_seed(0)
    model = LanguageModel(hidden).train()  # transformers builds models in eval mode
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=1.0,
        callbacks=[ScanCallback(path)],  # the whole change
        logger=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(model, make_data(steps * accumulation))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the .mscan file to write")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    train(arguments.path, steps=arguments.steps)
