"""New tokenizers: trained on texts or built from vocabulary files, and saved as a
folder for Megatron.

Invariant: Megatron's HuggingFaceTokenizer loads a saved folder without a network, and
it has the special tokens that the task needs; the same texts in the same order give the
same tokenizer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from megatron_2bw.base.errors import file_errors

EOD = "<|endoftext|>"

# By their transformers names, in the order of their ids. Megatron uses `eos_token` as
# its end of document; its BERT dataset writes the padding's id into the padding mask,
# so that must be 0.
GPT = {"eos_token": EOD}
BERT = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# single characters in a WordPiece vocabulary; rarer ones are unknown, as in BERT's own
_LETTERS = 1000


def special_tokens(task: str, kind: str) -> dict[str, str]:
    """The special tokens of a new tokenizer. `kind` is bpe, which knows every byte, or
    wordpiece."""
    if task == "bert":
        return BERT
    return GPT if kind == "bpe" else GPT | {"unk_token": BERT["unk_token"]}


def train_bpe(texts: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: lossless, so decoding restores the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = dict(
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, **words)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_wordpiece(
    read: Callable[[], Iterable[str]],
    vocab_size: int,
    special: dict[str, str],
    cased: bool = False,
) -> Tokenizer:
    """A WordPiece tokenizer as BERT has it. `read` is called twice.

    The trainer leaves two choices to chance: which of equally frequent letters to keep,
    and the order of the letters within words, which breaks the ties of merges. Both are
    fixed by passing the letters as special tokens; the result is then rebuilt from its
    vocabulary. Letters come twice, at the start of a word and within it, so at most a
    third of the vocabulary may be letters.
    """
    tokenizer = _bert_like(models.WordPiece(unk_token=special["unk_token"]), cased)
    found: Counter[str] = Counter()
    for text in read():
        found.update(tokenizer.normalizer.normalize_str(text))
    letters = sorted(
        (letter for letter in found if not letter.isspace()),
        key=lambda each: (-found[each], each),
    )
    limit = min(_LETTERS, (vocab_size - len(special)) // 3)
    # The letters that can follow another in a word; punctuation and ideographs are
    # words of their own.
    pairs = (
        (letter, tokenizer.normalizer.normalize_str(f"a{letter}"))
        for letter in letters[:limit]
    )
    within = [
        f"##{letter}"
        for letter, pair in pairs
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(pair)) == 1
    ]
    alphabet = dict(
        special_tokens=[*special.values(), *within],
        initial_alphabet=letters[:limit],
        limit_alphabet=limit,
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, show_progress=False, **alphabet
    )
    tokenizer.train_from_iterator(read(), trainer)
    rebuilt = _bert_like(
        models.WordPiece(tokenizer.get_vocab(), unk_token=special["unk_token"]), cased
    )
    rebuilt.add_special_tokens(list(special.values()))
    return rebuilt


def _bert_like(model: models.WordPiece, cased: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def from_files(folder: Path, vocab: Path, merges: Path | None, cased: bool) -> None:
    """Save the tokenizer of BERT's vocab.txt, or of GPT-2's vocab.json and merges.txt,
    as transformers has it."""
    from transformers import BertTokenizer, GPT2Tokenizer

    with file_errors("--vocab-file or --merge-file"):
        words = [
            path.read_text("utf-8") and str(path) for path in (vocab, merges) if path
        ]
    made = (
        GPT2Tokenizer(*words)
        if merges
        else BertTokenizer(*words, do_lower_case=not cased)
    )
    made.save_pretrained(str(folder))


def save(folder: Path, tokenizer: Tokenizer, special: dict[str, str]) -> None:
    """Save what Megatron's HuggingFaceTokenizer loads."""
    if "cls_token" in special:  # it encloses an encoded text, or a pair of texts
        start, end = special["cls_token"], special["sep_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A {end}",
            pair=f"{start} $A {end} $B:1 {end}:1",
            special_tokens=[
                (token, tokenizer.token_to_id(token)) for token in (start, end)
            ],
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    config["clean_up_tokenization_spaces"] = False  # decoding must not touch the text
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
