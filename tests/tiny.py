"""Tiny models made on the spot: a byte-level tokenizer and a random two-layer Llama, as a Hugging Face folder.

The folder loads with `tokenizers`, `transformers.AutoTokenizer` and `AutoModelForCausalLM`. torch is imported only
where a model is made, so tests of the light rooms stay light.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from agentjet.types import ModelInfo

TEMPLATES = Path(__file__).parent / "templates"

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2, as SmolLM2 has them; then 256 bytes, then the merges."""

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, as Qwen3 has them; the last ids, but for those of `DIALECTS`."""


@dataclass(frozen=True)
class Dialect:
    """The special tokens that a template writes beyond `SPECIAL`; `ends` end a turn, the usual one first."""

    special: tuple[str, ...] = ()
    bos: str = "<|endoftext|>"
    ends: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")


DIALECTS = {
    "llama3": Dialect(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|python_tag|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
        ends=("<|eot_id|>", "<|end_of_text|>"),
    ),
    "mistral": Dialect(
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        bos="<s>",
        ends=("</s>",),
    ),
}  # fmt: skip
"""By template. Tokens of a dialect are in its own tokenizer only, so that nobody else's vocabulary changes."""


@cache
def families() -> dict[str, Any]:
    """The table of model families; its `about` explains it."""
    table: dict[str, Any] = json.loads((TEMPLATES / "families.json").read_text(encoding="utf-8"))
    return table


CALL_ENDS = {
    "gpt_oss": ("<|return|>",),
    "gemma4": ("<|tool_response>",),
    "apertus": ("<|tools_suffix|>",),
    "glm4_5": ("<|user|>",),
    "glm4_7": ("<|user|>",),
    "apriel1_5": ("<|end|>",),
}
"""Further end tokens of a family, as its generation config has them."""

MERGES = (
    ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "a"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), ("Ġ", "="),
    ("l", "l"), ("he", "ll"), ("hell", "o"), ("1", "2"), ("4", "2"), ("Ċ", "Ċ"), ("u", "s"), ("us", "er"),
    ("Ġ", "Ġ"), ("â", "Ĥ"), ("<", "|"), ("|", ">"),
)  # fmt: skip
"""A few merges; one ("â" + "Ĥ": the bytes e2 82) ends inside a character."""


def template(name: str) -> str:
    """Source of `tests/templates/<name>.jinja`."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


def dialect(template_name: str) -> Dialect:
    """The special tokens of a template in `tests/templates`."""
    entry = families()["templates"].get(template_name)
    if template_name in DIALECTS or entry is None:
        return DIALECTS.get(template_name, Dialect())
    own = dict.fromkeys((*entry["control_tokens"], entry["end"], entry["eos"]))
    ends = tuple(dict.fromkeys((entry["eos"], entry["end"], *CALL_ENDS.get(template_name, ()))))
    return Dialect(tuple(token for token in own if token not in (*SPECIAL, *MARKERS)), ends=ends)


def tokenizer(template_name: str = "chatml") -> Tokenizer:
    """The byte-level BPE tokenizer of every tiny model, with the special tokens of its template."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(token, normalized=False) for token in MARKERS])
    special = dialect(template_name).special
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return made


def sentencepiece(prefix: str) -> Tokenizer:
    """A BPE tokenizer of SentencePiece's kind with byte fallback, as Llama 2, Mistral and Phi-3 have.

    `prefix` is its way to add the dummy prefix: `prepend` (a normaliser), `always` or `first` (`Metaspace`), or `none`.
    """
    vocab = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>"))}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    for char in "▁" + "".join(map(chr, range(0x21, 0x7F))):
        vocab[char] = len(vocab)
    merges = [("▁", "["), ("h", "e"), ("▁", "he"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("▁he", "llo"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    mark = normalizers.Replace(" ", "▁")
    if prefix in ("always", "first"):
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark]) if prefix == "prepend" else mark
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def make_tokenizer(folder: Path | str, template_name: str = "chatml") -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `folder`, which is made."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(template_name).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": dialect(template_name).bos,
        "eos_token": dialect(template_name).ends[0],
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template(template_name), encoding="utf-8")
    return folder


def make_model_info(folder: Path | str, template_name: str = "chatml", *, tool_format: str = "") -> ModelInfo:
    """A tokenizer in `folder` and the card a worker would send for a tiny model."""
    path = make_tokenizer(folder, template_name)
    speaks, ids = dialect(template_name), tokenizer(template_name)
    return ModelInfo(
        name="tiny",
        tokenizer_path=str(path),
        chat_template=template(template_name),
        context_length=2048,
        end_tokens=tuple(ids.token_to_id(end) for end in speaks.ends),
        bos_token=speaks.bos,
        eos_token=speaks.ends[0],
        tool_format=tool_format,
    )


def make_model(
    folder: Path | str, *, template: str = "chatml", layers: int = 2, hidden: int = 32, seed: int = 0
) -> Path:
    """A random Llama with `make_tokenizer`'s tokenizer, as a Hugging Face folder; the same seed, the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = make_tokenizer(folder, template)
    config = LlamaConfig(
        vocab_size=tokenizer().get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL.index("<|endoftext|>"),
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    return path


def overrides(model: Path, **job: Any) -> list[str]:
    """`setting=value` for a server of a tiny model on one core; a `job` setting's `__` is a dot."""
    settings = {
        "model.name": model,
        "model.device": "cpu",
        "model.dtype": "float32",
        "model.threads": 1,
        "sampler.cache_tokens": 16384,
        **{f"job.{name.replace('__', '.')}": value for name, value in job.items()},
    }
    return [f"{name}={value}" for name, value in settings.items()]


def set_options(model: Path, **job: Any) -> list[str]:
    """The same as options of a command."""
    return [part for override in overrides(model, **job) for part in ("--set", override)]
