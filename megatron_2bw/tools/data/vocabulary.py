"""New tokenizers: trained on texts or built from vocabulary files, and saved as a
folder for Megatron.

Invariant: Megatron's HuggingFaceTokenizer loads a saved folder without a network, and
it has the special tokens that the task needs; the same texts in the same order give the
same tokenizer.
"""

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


def train_bpe(
    texts: Iterable[str], vocab_size: int, special: dict[str, str]
) -> Tokenizer:
    """A byte-level BPE tokenizer: lossless, so decoding restores the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
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
    tokenizer = _wordpiece({}, special, cased)
    limit = min(_LETTERS, (vocab_size - len(special)) // 3)
    letters = _frequent_letters(tokenizer, read(), limit)
    # The letters that can follow another in a word; punctuation and ideographs are
    # words of their own.
    within = []
    for letter in letters:
        pair = tokenizer.normalizer.normalize_str(f"a{letter}")
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(pair)) == 1:
            within.append(f"##{letter}")
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special.values(), *within],
        initial_alphabet=letters,
        limit_alphabet=limit,
        show_progress=False,
    )
    tokenizer.train_from_iterator(read(), trainer)
    rebuilt = _wordpiece(tokenizer.get_vocab(), special, cased)
    rebuilt.add_special_tokens(list(special.values()))
    return rebuilt


def _frequent_letters(
    tokenizer: Tokenizer, texts: Iterable[str], limit: int
) -> list[str]:
    counts = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    for space in filter(str.isspace, list(counts)):
        del counts[space]
    return sorted(counts, key=lambda letter: (-counts[letter], letter))[:limit]


def _wordpiece(
    vocab: dict[str, int], special: dict[str, str], cased: bool
) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=special["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def from_file(folder: Path, vocab: Path, cased: bool) -> None:
    """Save the tokenizer of BERT's vocab.txt as transformers has it."""
    from transformers import BertTokenizer

    with file_errors(f"--vocab-file {vocab}"):
        vocab.read_text("utf-8")
    BertTokenizer(str(vocab), do_lower_case=not cased).save_pretrained(folder)


def save(folder: Path, tokenizer: Tokenizer, special: dict[str, str]) -> None:
    """Save what Megatron's HuggingFaceTokenizer loads."""
    if "cls_token" in special:  # it encloses an encoded text, or a pair of texts
        start = special["cls_token"]
        end = special["sep_token"]
        tokenizer.post_processor = processors.BertProcessing(
            (end, tokenizer.token_to_id(end)), (start, tokenizer.token_to_id(start))
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    config["clean_up_tokenization_spaces"] = False  # decoding must not touch the text
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
