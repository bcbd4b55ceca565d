"""Trains a small GPT-2 with the Trainer of transformers."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.arange(16) + index % 4
        return {"input_ids": tokens, "labels": tokens}


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
    ["--output_dir", tempfile.mkdtemp(), "--use_cpu", "true", "--report_to", "none", *sys.argv[1:]]
)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16))
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
