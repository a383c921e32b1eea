"""Fine-tune Whisper on speech with transformers' Seq2SeqTrainer."""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

RATE = 16000


class Tones(Dataset):
    """Each sample is a sound of one to --seconds seconds, and a text as long as the sound."""

    def __init__(self, samples, seconds, extractor, vocab):
        self.samples, self.seconds, self.extractor, self.vocab = samples, seconds, extractor, vocab

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        seconds = rng.uniform(min(1, self.seconds / 2), self.seconds)
        sound = np.sin(2 * np.pi * rng.uniform(100, 1000) * np.arange(int(seconds * RATE)) / RATE).astype(np.float32)
        features = self.extractor(sound, sampling_rate=RATE).input_features[0]
        return {"input_features": features, "labels": rng.integers(10, self.vocab, int(4 * seconds) + 2).tolist()}


@dataclass
class DataCollatorSpeechSeq2SeqWithPadding:
    pad_token_id: int
    decoder_start_token_id: int

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sounds = torch.from_numpy(np.stack([feature["input_features"] for feature in features]))
        rows = [torch.tensor(feature["labels"]) for feature in features]
        labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        if (labels[:, 0] == self.decoder_start_token_id).all().cpu().item():
            labels = labels[:, 1:]
        return {"input_features": sounds, "labels": labels}


parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--seconds", type=int, default=30)
parser.add_argument("--vocab", type=int, default=51865)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--max-steps", type=int, default=8)
args = parser.parse_args()

extractor = WhisperFeatureExtractor(chunk_length=args.seconds)
config = WhisperConfig(
    vocab_size=args.vocab, d_model=args.width, max_source_positions=50 * args.seconds, dropout=0.1,
    encoder_layers=args.layers, encoder_attention_heads=args.heads, encoder_ffn_dim=4 * args.width,
    decoder_layers=args.layers, decoder_attention_heads=args.heads, decoder_ffn_dim=4 * args.width,
    pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=2, suppress_tokens=None,
    begin_suppress_tokens=None,
)  # fmt: skip
model = WhisperForConditionalGeneration(config)
model.config.use_cache = False
training_args = Seq2SeqTrainingArguments(
    output_dir="whisper-out",
    per_device_train_batch_size=args.batch_size,
    per_device_eval_batch_size=args.batch_size,
    gradient_accumulation_steps=1,
    learning_rate=1e-5,
    warmup_steps=5,
    max_steps=args.max_steps,
    gradient_checkpointing=True,
    fp16=torch.cuda.is_available(),
    predict_with_generate=True,
    generation_max_length=16,
    eval_strategy="steps",
    eval_steps=args.max_steps,
    save_strategy="no",
    logging_steps=1,
    dataloader_num_workers=2,
    report_to=[],
)
trainer = Seq2SeqTrainer(
    args=training_args,
    model=model,
    train_dataset=Tones(args.samples, args.seconds, extractor, args.vocab),
    eval_dataset=Tones(args.batch_size, args.seconds, extractor, args.vocab),
    data_collator=DataCollatorSpeechSeq2SeqWithPadding(config.pad_token_id, config.decoder_start_token_id),
    processing_class=extractor,
)
trainer.train()
trainer.save_model()
