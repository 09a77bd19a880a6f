"""The needle model's tokenizer: a token for each of about two thousand English words."""

from __future__ import annotations

from importlib.resources import files

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

UNKNOWN, FULL_STOP, END = "<unk>", ".", "<|endoftext|>"
START, USER, ASSISTANT = "[gMASK]", "<|user|>", "<|assistant|>"
# GLM's special tokens, less those of tools. `UNKNOWN` is the first: it is the likeliest token where
# all logits are equal.
_SPECIAL = (UNKNOWN, END, START, "<sop>", "<|system|>", USER, ASSISTANT)
# GLM's form, without the line breaks, which a tokenizer of words does not see.
_CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def needle_words() -> tuple[str, ...]:
    """Return the words of the vocabulary in alphabetical order."""
    file = files("razor_dist.configs").joinpath("needle_words.txt")
    return tuple(file.read_text(encoding="utf-8").split())


def needle_vocabulary() -> dict[str, int]:
    """Return token ids: special tokens first, then the full stop, then `needle_words`."""
    tokens = (*_SPECIAL, FULL_STOP, *needle_words())
    return {token: index for index, token in enumerate(tokens)}


def needle_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Make a word-level tokenizer that begins every text with ``[gMASK] <sop>``, as GLM's does.

    Case is ignored; a word outside the vocabulary becomes ``<unk>``.
    """
    vocabulary = needle_vocabulary()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} <sop> $A",
        special_tokens=[(token, vocabulary[token]) for token in (START, "<sop>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[t for t in _SPECIAL if t not in (UNKNOWN, END)],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
