"""Data in the shapes that public scripts read, made up: a simulated step needs sizes, and nobody looks at the rest."""

from __future__ import annotations

import json
import pickle
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

_WORDS = 50256
"""Tokens of GPT-2 without the one that ends a document."""

_MAGIC, _VERSION = 20240520, 1
_LONGEST = 1500


def tokens(folder: Path) -> None:
    """Write files of GPT-2's tokens as llm.c and modded-nanogpt read them: a header of 256 integers, then 16 bits each.

    Documents have 50 to 1,500 tokens. The numbers of tokens are enough for a validation and a hundred steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    for name, count in {"train_000001": 40_000_000, "train_000002": 40_000_000, "val_000000": 40_000_000}.items():
        found = draws.integers(0, _WORDS, count, dtype=np.uint16)
        ends = np.cumsum(draws.integers(50, _LONGEST, count // 50))
        found[0] = found[ends[ends < count]] = _WORDS
        header = np.zeros(256, np.int32)
        header[:3] = _MAGIC, _VERSION, count
        with (folder / f"fineweb_{name}.bin").open("wb") as file:
            file.write(header.tobytes())
            file.write(found.tobytes())


def text(file: Path) -> None:
    """Write a text of a million characters, of which 65 differ."""
    file.parent.mkdir(parents=True, exist_ok=True)
    characters = np.frombuffer(f"{string.ascii_letters} \n.,;:!?'-&3$".encode(), np.uint8)
    file.write_bytes(np.random.default_rng(0).choice(characters, 1_000_000).tobytes())


def mnist(folder: Path) -> None:
    """Write the four files of MNIST where torchvision looks for them below a folder: as many pictures as it has."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    for name, count in {"train": 60_000, "t10k": 10_000}.items():
        pictures = draws.integers(0, 256, (count, 28, 28), np.uint8)
        labels = draws.integers(0, 10, count, np.uint8)
        for kind, values in (("images-idx3", pictures), ("labels-idx1", labels)):
            header = np.array([0x800 + values.ndim, *values.shape], ">i4")
            (raw / f"{name}-{kind}-ubyte").write_bytes(header.tobytes() + values.tobytes())


def pictures(folder: Path, per_class: int = 40) -> None:
    """Write JPEGs of 500 x 375 dots, as many as ImageNet's have, in ``train`` and ``val``, of ten classes each."""
    draws = np.random.default_rng(0)
    for part in ("train", "val"):
        for label in range(10):
            of_class = folder / part / f"n{label:08}"
            of_class.mkdir(parents=True, exist_ok=True)
            for number in range(per_class):
                coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), np.uint8))
                coarse.resize((500, 375)).save(of_class / f"{number}.jpg")


def gpt_tokens(folder: Path) -> None:
    """Write ``train.bin`` and ``val.bin`` as nanoGPT reads them: tokens of 16 bits, of a text of 65 characters."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in {"train": 1_000_000, "val": 100_000}.items():
        np.random.default_rng(0).integers(0, 65, count, np.uint16).tofile(folder / f"{part}.bin")


def bsds300(folder: Path) -> None:
    """Write pictures in the folders of BSDS300, ``train`` and ``test``: 200 and 100 of 481 x 321 dots."""
    draws = np.random.default_rng(0)
    for part, count in {"train": 200, "test": 100}.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            coarse = Image.fromarray(draws.integers(0, 256, (10, 15, 3), np.uint8))
            coarse.resize((481, 321)).save(folder / part / f"{number}.jpg")


def wikitext(folder: Path) -> None:
    """Write a text with as many words as WikiText-2 has, in as many lines: 33,278 of them differ."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    for part, count in {"train": 2_051_910, "valid": 213_886, "test": 241_211}.items():
        words = [*range(33_277), *draws.integers(0, 33_277, count - 33_277).tolist()]
        lines = (" ".join(f"w{word}" for word in words[first : first + 56]) for first in range(0, count, 56))
        (folder / f"{part}.txt").write_text("".join(f"{line}\n" for line in lines))


def fashion_mnist(folder: Path) -> None:
    """Write the four files of Fashion-MNIST, which has the sizes of MNIST."""
    mnist(folder)
    (folder / "MNIST").rename(folder / "FashionMNIST")


def coco(folder: Path) -> None:
    """Write pictures and annotations of COCO 2017, all instances and keypoints: 48 pictures, two to seven objects each.

    An object is a polygon in a box of 20 to 300 dots, and its area is that of the box.
    """
    draws = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    categories = [{"id": number, "name": f"class {number}"} for number in range(1, 91)]
    for part in ("train2017", "val2017"):
        (folder / part).mkdir(exist_ok=True)
        images, objects = [], []
        for number in range(1, 49):
            width, height = ((640, 480), (480, 640), (640, 427))[number % 3]
            images.append({"id": number, "file_name": f"{number:012}.jpg", "width": width, "height": height})
            coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), np.uint8))
            coarse.resize((width, height)).save(folder / part / images[-1]["file_name"])
            objects += [
                _coco_object(draws, number, width, height, 100 * number + each) for each in range(draws.integers(2, 8))
            ]
        for kind in ("instances", "person_keypoints"):
            of_kind = [each | {"category_id": 1} for each in objects] if kind == "person_keypoints" else objects
            stored = {"info": {}, "images": images, "annotations": of_kind, "categories": categories}
            (folder / "annotations" / f"{kind}_{part}.json").write_text(json.dumps(stored))


def _coco_object(draws: np.random.Generator, picture: int, width: int, height: int, number: int) -> dict[str, Any]:
    wide, high = (int(draws.integers(20, 300)) for _ in range(2))
    left, top = int(draws.integers(0, width - wide)), int(draws.integers(0, height - high))
    polygon = [left, top, left + wide, top, left + wide, top + high, left, top + high]
    points = draws.integers((left, top), (left + wide, top + high), (17, 2)).tolist()
    return {
        "id": number,
        "image_id": picture,
        "category_id": int(draws.choice([1, 2, 3, 4, 5, 6, 7, 9, 16, 17, 18, 19, 20, 21, 44, 62, 63, 64, 67, 72])),
        "bbox": [left, top, wide, high],
        "area": wide * high,
        "iscrowd": 0,
        "segmentation": [polygon],
        "keypoints": [value for x, y in points for value in (x, y, 2)],
        "num_keypoints": len(points),
    }


def autoencoder(folder: Path) -> None:
    """Write the config of Stable Diffusion's autoencoder, without its weights."""
    from diffusers.models import AutoencoderKL

    widths = (128, 256, 512, 512)
    down, up = ("DownEncoderBlock2D",) * len(widths), ("UpDecoderBlock2D",) * len(widths)
    with torch.device("meta"):
        made = AutoencoderKL(3, 3, down, up, widths, layers_per_block=2, latent_channels=4, sample_size=256)
    made.save_config(folder)


def nanochat(folder: Path) -> None:
    """Write a tokenizer of 32,768 tokens, all pairs of bytes as far as these reach, and three files of documents."""
    import pyarrow
    import tiktoken
    from pyarrow import parquet

    ranks = {bytes([first]): first for first in range(256)}
    ranks |= {bytes(divmod(number, 256)): 256 + number for number in range(32_768 - 256 - 9)}
    speakers = ("user", "assistant", "python", "output")
    special = ("bos", *(f"{who}_{what}" for who in speakers for what in ("start", "end")))
    encoding = tiktoken.Encoding(
        "made-up",
        pat_str=r"\S+|\s+",
        mergeable_ranks=ranks,
        special_tokens={f"<|{name}|>": len(ranks) + number for number, name in enumerate(special)},
    )
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = [*map(len, ranks), *(0 for _ in special)]
    torch.save(torch.tensor(lengths, dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")
    draws = np.random.default_rng(0)
    (folder / "base_data_climbmix").mkdir(exist_ok=True)
    for shard in range(3):
        counts = draws.integers(500, 9000, 2000)
        texts = ["".join(draws.choice(list(string.ascii_letters + "    "), count)) for count in counts]
        file = folder / "base_data_climbmix" / f"shard_{shard:05}.parquet"
        parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=500)
