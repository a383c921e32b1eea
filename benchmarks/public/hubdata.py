"""Models, tokenizers, data sets and metrics in the folders that scripts of Hugging Face's libraries read, made up.

A table's ``made`` names the folders, and what each is: a model of ``MODELS``, or a function of this file. The libraries
read a local folder in place of one of their hub with the same name, so scripts that name theirs run unchanged.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import mnist as mnist

WORDS = 1000
"""Words of all texts, ``w0`` to ``w999``, which each tokenizer has beside its special tokens."""

_SPECIAL = ("<unk>", "<cls>", "<sep>", "<pad>", "<mask>", "<s>", "</s>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
_VOCABULARY = 1024
_SMALL: Mapping[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "pad_token_id": 3,
    "bos_token_id": 5,
    "eos_token_id": 6,
}
_PICTURES: Mapping[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2: Mapping[str, Any] = {"vocab_size": _VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_ENCODER_DECODER: Mapping[str, Any] = {"vocab_size": _VOCABULARY, "d_model": 128, "decoder_start_token_id": 3}
_BART: Mapping[str, Any] = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 256}.items()
}

MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bert": ("Bert", "MaskedLM", {**_SMALL, "max_position_embeddings": 512}),
    "roberta": ("Roberta", "MaskedLM", {**_SMALL, "max_position_embeddings": 514}),
    "gpt2": ("GPT2", "CausalLM", {**_GPT2, "bos_token_id": 5, "eos_token_id": 6}),
    "llama": ("Llama", "CausalLM", {**_SMALL, "max_position_embeddings": 2048, "num_key_value_heads": 2}),
    "llama-reward": ("Llama", "SequenceClassification", {**_SMALL, "num_key_value_heads": 2, "num_labels": 1}),
    "xlnet": ("XLNet", "CausalLM", {"vocab_size": _VOCABULARY, "d_model": 128, "n_layer": 2, "n_head": 4}),
    "t5": ("T5", "Seq2SeqLM", {**_ENCODER_DECODER, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}),
    "bart": ("Bart", "Seq2SeqLM", {**_ENCODER_DECODER, **_BART, "pad_token_id": 3, "bos_token_id": 5}),
    "vit": ("ViT", "ImageClassification", {**_PICTURES, "intermediate_size": 256}),
    "vit-mae": ("ViTMAE", "PreTraining", {**_PICTURES, "intermediate_size": 256, "decoder_num_hidden_layers": 2}),
    "segformer": ("Segformer", "SemanticSegmentation", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128]}),
    "yolos": ("Yolos", "ObjectDetection", {**_PICTURES, "intermediate_size": 256, "num_detection_tokens": 20}),
}
"""The class of a model's config, its head, and sizes."""

_PROCESSORS = {
    "vit": "ViTImageProcessor",
    "vit-mae": "ViTImageProcessor",
    "segformer": "SegformerImageProcessor",
    "yolos": "YolosImageProcessor",
}


_SPLITS = ("train", "validation", "test")
_FILES = "".join(f"      - {{split: {split}, path: {split}.json}}\n" for split in _SPLITS)


def made(name: str, place: Path) -> None:
    """Fill a folder with a model, or with what a function of this file makes."""
    place.mkdir(parents=True, exist_ok=True)
    if name in MODELS:
        model(name, place)
    elif name in METRICS:
        metric(name, place)
    else:
        maker: Callable[[Path], None] = globals()[name]
        maker(place)


def model(name: str, folder: Path) -> None:
    """Save a small model with random weights, and its tokenizer or image processor."""
    import transformers

    config_name, head, sizes = MODELS[name]
    config = getattr(transformers, f"{config_name}Config")(**sizes)
    getattr(transformers, f"AutoModelFor{head}").from_config(config).save_pretrained(folder)
    if name in _PROCESSORS:
        getattr(transformers, _PROCESSORS[name])().save_pretrained(folder)
    else:
        tokenizer(folder)


def tokenizer(folder: Path) -> None:
    """Save a tokenizer of words, with a template for conversations."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *(f"w{number}" for number in range(WORDS))]
    whole = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    whole.pre_tokenizer = WhitespaceSplit()
    whole.post_processor = TemplateProcessing(
        single="<cls> $A <sep>", pair="<cls> $A <sep> $B:1 <sep>:1", special_tokens=[("<cls>", 1), ("<sep>", 2)]
    )
    names = ("unk", "cls", "sep", "pad", "mask", "bos", "eos")
    special = {f"{name}_token": token for name, token in zip(names, _SPECIAL, strict=False)}
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, **special, model_max_length=512, chat_template=_TEMPLATE)
    fast.save_pretrained(folder)


def _texts(least: int, most: int) -> Iterator[str]:
    draws = np.random.default_rng(0)
    while True:
        yield " ".join(f"w{word}" for word in draws.integers(0, WORDS, draws.integers(least, most)))


def _rows(folder: Path, row: Callable[[int, Iterator[str]], Mapping[str, Any]], count: int = 200) -> None:
    """Write the splits of a data set as lines of JSON, in files that the scripts and ``load_dataset`` find."""
    texts = _texts(5, 60)
    for split in _SPLITS:
        lines = (json.dumps(row(number, texts)) for number in range(count))
        (folder / f"{split}.json").write_text("\n".join(lines) + "\n")


def language(folder: Path) -> None:
    """Write texts."""
    _rows(folder, lambda _, texts: {"text": next(texts)})


def wikitext(folder: Path) -> None:
    """Write texts with a config's name, of which there are many short ones."""
    _rows(folder, lambda _, texts: {"text": next(texts)}, 1200)
    (folder / "README.md").write_text(f"---\nconfigs:\n  - config_name: wikitext-2-v1\n    data_files:\n{_FILES}---\n")


def sentences(folder: Path) -> None:
    """Write pairs of sentences with one of two labels."""
    _rows(folder, lambda number, texts: {"sentence1": next(texts), "sentence2": next(texts), "label": number % 2})


def glue(folder: Path) -> None:
    """Write GLUE's MRPC: a data set with a config of its name."""

    def row(number: int, texts: Iterator[str]) -> Mapping[str, Any]:
        return {"sentence1": next(texts), "sentence2": next(texts), "label": number % 2, "idx": number}

    _rows(folder, row)
    label = "      - {name: label, dtype: {class_label: {names: {'0': not_equivalent, '1': equivalent}}}}\n"
    named = {"sentence1": "string", "sentence2": "string"}
    features = "".join(f"      - {{name: {name}, dtype: {kind}}}\n" for name, kind in named.items())
    features += label + "      - {name: idx, dtype: int32}\n"
    card = f"---\nconfigs:\n  - config_name: mrpc\n    data_files:\n{_FILES}"
    card += f"dataset_info:\n  - config_name: mrpc\n    features:\n{features}---\n"
    (folder / "README.md").write_text(card)


def entities(folder: Path) -> None:
    """Write words with labels."""
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

    def row(_: int, texts: Iterator[str]) -> Mapping[str, Any]:
        words = next(texts).split()
        return {"tokens": words, "ner_tags": [labels[place % len(labels)] for place in range(len(words))]}

    _rows(folder, row)


def questions(folder: Path) -> None:
    """Write questions with answers in their contexts, in SQuAD's shape; each file is one object."""
    contexts, asked = _texts(100, 600), _texts(5, 20)
    for split in _SPLITS:
        rows = []
        for number in range(100):
            context = next(contexts)
            start = context.index(" ", len(context) // 2) + 1
            answer = {"text": [context[start : start + 20].rsplit(" ", 1)[0]], "answer_start": [start]}
            rows.append(
                {"id": f"{split}{number}", "title": "", "context": context, "question": next(asked), "answers": answer}
            )
        (folder / f"{split}.json").write_text(json.dumps({"version": "1.1", "data": rows}))


def choices(folder: Path) -> None:
    """Write beginnings with four ends, in SWAG's shape."""

    def row(number: int, texts: Iterator[str]) -> Mapping[str, Any]:
        ends = {f"ending{place}": next(texts) for place in range(4)}
        return {"sent1": next(texts), "sent2": next(texts), **ends, "label": number % 4}

    _rows(folder, row)


def summaries(folder: Path) -> None:
    """Write texts with summaries."""
    short = _texts(5, 20)
    _rows(folder, lambda _, texts: {"text": " ".join(itertools.islice(texts, 8)), "summary": next(short)})


def translations(folder: Path) -> None:
    """Write pairs of texts in two languages."""
    _rows(folder, lambda _, texts: {"translation": {"en": next(texts), "de": next(texts)}})


def pictures(folder: Path) -> None:
    """Write pictures of two sizes and three classes, one folder for each."""
    for number, picture in enumerate(_pictures(48)):
        place = folder / "train" / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        picture.save(place / f"{number}.png")


def pets(folder: Path) -> None:
    """Write pictures whose file names have their class, as those of the Oxford-IIIT pets."""
    for number, picture in enumerate(_pictures(96)):
        picture.save(folder / f"breed{number % 3}_{number}.jpg")


def _pictures(count: int) -> Iterator[Any]:
    from PIL import Image

    draws = np.random.default_rng(0)
    for number in range(count):
        size = (240, 320, 3) if number % 2 else (256, 256, 3)
        yield Image.fromarray(draws.integers(0, 256, size, dtype=np.uint8))


def kitti(folder: Path) -> None:
    """Write pictures with a class for each of their dots, in folders of KITTI's names."""
    from PIL import Image

    for part, mode in {"image_2": "RGB", "semantic": "L"}.items():
        (folder / "training" / part).mkdir(parents=True)
        for number in range(24):
            Image.new(mode, (1242, 376), 7 if mode == "L" else 0).save(folder / "training" / part / f"{number}.png")


def boxes(folder: Path) -> None:
    """Write pictures with one to five boxes each, of three categories."""
    from datasets import ClassLabel, Dataset, Features, Image, Sequence, Value

    draws = np.random.default_rng(0)
    objects = {
        "id": Sequence(Value("int64")),
        "area": Sequence(Value("int64")),
        "bbox": Sequence(Sequence(Value("float32"), length=4)),
        "category": Sequence(ClassLabel(names=["bolt", "nut", "washer"])),
    }
    features = Features(
        {"image_id": Value("int64"), "image": Image(), "width": Value("int32"), "height": Value("int32")}
        | {"objects": objects}
    )
    for split, count in {"train": 40, "validation": 10, "test": 10}.items():
        rows = []
        for number, picture in enumerate(_pictures(count)):
            found = range(1 + number % 5)
            corners = draws.integers(0, 100, (len(found), 2)).tolist()
            held = {
                "id": list(found),
                "area": [50 * 60 for _ in found],
                "bbox": [[*corner, 50, 60] for corner in corners],
                "category": [each % 3 for each in found],
            }
            size = {"width": picture.width, "height": picture.height}
            rows.append({"image_id": number, "image": picture, **size, "objects": held})
        Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}.parquet")


def _conversation(texts: Iterator[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": next(texts)}, {"role": "assistant", "content": next(texts)}]


def conversations(folder: Path) -> None:
    """Write conversations."""
    _rows(folder, lambda _, texts: {"messages": _conversation(texts)})


def preferences(folder: Path) -> None:
    """Write two conversations each that begin alike: one that is chosen, and one that is rejected."""

    def row(_: int, texts: Iterator[str]) -> Mapping[str, Any]:
        chosen, rejected = _conversation(texts), _conversation(texts)
        return {"chosen": chosen, "rejected": [chosen[0], rejected[1]]}

    _rows(folder, row)


def prompts(folder: Path) -> None:
    """Write first turns of conversations, with solutions."""

    def row(_: int, texts: Iterator[str]) -> Mapping[str, Any]:
        return {"prompt": [{"role": "user", "content": next(texts)}], "solution": "$1$"}

    _rows(folder, row)


def problems(folder: Path) -> None:
    """Write problems with solutions, in the columns of NuminaMath."""
    _rows(folder, lambda _, texts: {"problem": next(texts), "solution": "$1$", "messages": _conversation(texts)}, 400)


def judged(folder: Path) -> None:
    """Write prompts with completions that are good or not."""

    def row(number: int, texts: Iterator[str]) -> Mapping[str, Any]:
        prompt, completion = _conversation(texts)
        return {"prompt": [prompt], "completion": [completion], "label": number % 2 == 0}

    _rows(folder, row)


def steps(folder: Path) -> None:
    """Write prompts with the steps of their completions, each good or not."""

    def row(_: int, texts: Iterator[str]) -> Mapping[str, Any]:
        return {"prompt": next(texts), "completions": [next(texts), next(texts)], "labels": [True, False]}

    _rows(folder, row)


_CLASSES = "'predictions': Value('int64'), 'references': Value('int64')"
_NUMBERS = "'predictions': Value('float64'), 'references': Value('float64')"
_STRINGS = "'predictions': Value('string'), 'references': Value('string')"
_LISTS = "'predictions': Sequence(Value('string')), 'references': Sequence(Value('string'))"
_ANSWERS = (
    "'predictions': {'id': Value('string'), 'prediction_text': Value('string')}, 'references': {'id': Value('string'), "
    "'answers': Sequence({'text': Value('string'), 'answer_start': Value('int32')})}"
)
METRICS: Mapping[str, tuple[str, str]] = {
    "metric-accuracy": (_CLASSES, "accuracy"),
    "metric-glue": (_CLASSES, "accuracy f1"),
    "metric-f1": (_CLASSES, "f1"),
    "metric-mse": (_NUMBERS, "mse"),
    "metric-seqeval": (_LISTS, "overall_precision overall_recall overall_f1 overall_accuracy"),
    "metric-squad": (_ANSWERS, "exact_match f1"),
    "metric-rouge": (_STRINGS, "rouge1 rouge2 rougeL rougeLsum"),
    "metric-sacrebleu": ("'predictions': Value('string'), 'references': Sequence(Value('string'))", "score"),
}
"""The features of a metric's columns, and its results, which are all 0.5."""


def metric(name: str, folder: Path) -> None:
    """Write a metric for ``evaluate.load`` that takes the columns of the real one, and computes nothing."""
    features, results = METRICS[name]
    lines = [
        "import evaluate",
        "from datasets import Features, Sequence, Value",
        "",
        "",
        "class Made(evaluate.Metric):",
        "    def _info(self):",
        f"        features = Features({{{features}}})",
        "        return evaluate.MetricInfo(description='', citation='', features=features)",
        "",
        "    def _compute(self, predictions, references, **options):",
        f"        return dict.fromkeys({results.split()!r}, 0.5)",
    ]
    (folder / f"{folder.name}.py").write_text("\n".join(lines) + "\n")


def punkt(folder: Path) -> None:
    """Write a folder in which nltk finds that sentences can be taken apart."""
    (folder / "tokenizers" / "punkt").mkdir(parents=True)


def instructions(folder: Path) -> None:
    """Write instructions with inputs and outputs, in Alpaca's columns."""

    def row(_: int, texts: Iterator[str]) -> Mapping[str, Any]:
        return {"instruction": next(texts), "input": next(texts), "output": next(texts)}

    _rows(folder, row)


def metamath(folder: Path) -> None:
    """Write questions with answers, in MetaMath's columns."""
    _rows(folder, lambda _, texts: {"query": next(texts), "response": next(texts)})


def openassistant(folder: Path) -> None:
    """Write texts of a split for training and one for tests, enough for a validation of 500."""
    _rows(folder, lambda _, texts: {"text": next(texts)}, 600)


def planetoid(folder: Path) -> None:
    """Write Cora's files with its sizes: 2,708 papers of 1,433 words and 7 classes, with 5,278 citations."""
    from scipy.sparse import random_array

    papers, words, classes, test = 2708, 1433, 7, 1000
    draws = np.random.default_rng(0)

    def features(count: int) -> Any:
        return random_array((count, words), density=0.0127, format="csr", dtype=np.float32, rng=0)

    def labels(count: int) -> Any:
        return np.eye(classes, dtype=np.int32)[draws.integers(0, classes, count)]

    graph: dict[int, list[int]] = {paper: [] for paper in range(papers)}
    for first, second in draws.integers(0, papers, (5278, 2)).tolist():
        graph[first].append(second)
        graph[second].append(first)
    rest = papers - test
    held = {"x": features(140), "tx": features(test), "allx": features(rest), "graph": graph}
    held |= {"y": labels(140), "ty": labels(test), "ally": labels(rest)}
    raw = folder / "Cora" / "raw"
    raw.mkdir(parents=True)
    for name, value in held.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(value))
    (raw / "ind.cora.test.index").write_text("\n".join(map(str, draws.permutation(range(rest, papers)))) + "\n")


def mutag(folder: Path) -> None:
    """Write MUTAG's files with its sizes: 188 graphs of 10 to 28 nodes."""
    _graphs(folder, "MUTAG", 188, (10, 29))


def proteins(folder: Path) -> None:
    """Write files of PROTEINS: 300 graphs of 4 to 80 nodes."""
    _graphs(folder, "PROTEINS", 300, (4, 80))


def _graphs(folder: Path, name: str, count: int, nodes: tuple[int, int]) -> None:
    draws = np.random.default_rng(0)
    edges, graphs, first = [], [], 1
    for graph in range(1, count + 1):
        size = int(draws.integers(*nodes))
        ring = [(first + place, first + (place + 1) % size) for place in range(size)]
        edges += [edge for one, other in ring for edge in ((one, other), (other, one))]
        graphs += [graph] * size
        first += size
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    written = {
        "A": [f"{one}, {other}" for one, other in edges],
        "graph_indicator": graphs,
        "graph_labels": [1 + graph % 2 for graph in range(count)],
        "node_labels": draws.integers(0, 3, len(graphs)).tolist(),
    }
    for part, lines in written.items():
        (raw / f"{name}_{part}.txt").write_text("\n".join(map(str, lines)) + "\n")


def wikitext2(folder: Path) -> None:
    """Write the text that Lightning's demonstrations read."""
    (folder / "wikitext-2.txt").write_text("\n".join(itertools.islice(_texts(10, 40), 8000)) + "\n")
