# SPDX-License-Identifier: Apache-2.0
"""Translate the network in `model.model_config` of a MindFormers 1.x file, where it has a published format.

Names and defaults: mindformers 1.9.0 models/glm2/glm2_config.py and models/llama/llama_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.reader import fields_from
from sporeloom.dialects.mindformers1.keys import MODEL
from sporeloom.dialects.settings import InputKeys
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.models.published import PublishedFormat, only, published_as

Values = dict[str, Any]
TYPE = MODEL + "type"
MOE = "moe_config."
EXPERTS = MOE + "expert_num"
RATES = tuple(MODEL + name for name in ("dropout_rate", "hidden_dropout_rate", "attention_dropout_rate"))
ACTIVATION = MODEL + "hidden_act"
OF_SIZE = {
    **{MODEL + name: name for name in ("num_layers", "num_heads", "hidden_size", "ffn_hidden_size", "vocab_size")},
    **dict.fromkeys(RATES, "dropout_rate"),
    ACTIVATION: "activation",
}
"""Keys of what a built-in size has, too -> field of the model configuration."""
ACTIVATIONS = {"gelu": "gelu_tanh", "fast_gelu": "fast_gelu", "silu": "silu"}
"""MindFormers' names of activations -> those here."""
DEFAULT_ACTIVATION = "fast_gelu"
"""The activation of MindFormers' PanguAlphaConfig, if a file names none."""
NO_SIZE = "trainer.model_name names no size: give --size, or the model by --config"


@dataclass(frozen=True)
class Kind:
    """Networks of one `type`, translated from a published config.json's keys."""

    family: str
    model_type: str
    """Value of `model_type` in that config.json."""
    defaults: Mapping[str, Any]
    """MindFormers' defaults of all keys that describe the network."""
    fixed: Mapping[str, Any]
    """Keys that can have one value here."""
    to_published: Callable[[Values], Values]
    from_model: Callable[[ModelConfig, Values], Values]
    """Convert a model configuration, given with its published config.json, to MindFormers' keys."""

    @property
    def way(self) -> PublishedFormat:
        return published_as(family_module(self.family, "weights").PUBLISHED, self.model_type, "")


def _glm_from_model(model: ModelConfig, published: Values) -> Values:
    return {key: published.get(key, default) for key, default in GLM_DEFAULTS.items()}


def _llama_to_published(theirs: Values) -> Values:
    width = theirs["intermediate_size"]
    if width is None:
        wanted = 4 * theirs["hidden_size"]
        if theirs["ffn_dim_multiplier"] is not None:
            wanted = int((theirs["ffn_dim_multiplier"] + 0.01) * wanted)
        width = -(-int(2 * wanted / 3) // theirs["multiple_of"]) * theirs["multiple_of"]
    published = {LLAMA[key]: value for key, value in theirs.items() if key in LLAMA}
    longest = theirs["max_position_embedding"] or theirs["seq_length"]
    return {**published, "intermediate_size": width, "max_position_embeddings": longest}


def _llama_from_model(model: ModelConfig, published: Values) -> Values:
    written = {theirs: published[ours] for theirs, ours in LLAMA.items()}
    return written | {
        "intermediate_size": published["intermediate_size"],
        "seq_length": model.seq_len,
        "qkv_has_bias": model.qkv_bias,
        "attn_proj_has_bias": model.output_bias,
    }


GLM_DEFAULTS = {
    **{"num_layers": 28, "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128},
    **{"num_attention_heads": 32, "multi_query_group_num": 2, "seq_length": 2048, "layernorm_epsilon": 1e-5},
    **{"rope_ratio": 1, "add_qkv_bias": True, "eos_token_id": 2, "multi_query_attention": True},
}
LLAMA = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "rms_norm_eps": "rms_norm_eps",
    "theta": "rope_theta",
    "eos_token_id": "eos_token_id",
    "tie_word_embeddings": "tie_word_embeddings",
    "init_method_std": "initializer_range",
}
"""MindFormers' key -> that of a Llama's config.json."""
LLAMA_DEFAULTS = {
    **{"vocab_size": 32000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "n_kv_heads": None},
    **{"rms_norm_eps": 1e-5, "theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": False},
    **{"init_method_std": 0.01, "intermediate_size": None, "multiple_of": 256, "ffn_dim_multiplier": None},
    **{"seq_length": 2048, "max_position_embedding": None, "qkv_has_bias": False, "attn_proj_has_bias": False},
}
BIASES = {"qkv_bias": "qkv_has_bias", "output_bias": "attn_proj_has_bias"}
KINDS = {
    "ChatGLM2Config": Kind(
        family="codegeex",
        model_type="chatglm",
        defaults=GLM_DEFAULTS,
        fixed={
            **{"rmsnorm": True, "post_layer_norm": True, "add_bias_linear": False, "pre_seq_len": None},
            **{"apply_residual_connection_post_layernorm": False, "fp32_residual_connection": False},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "prefix_projection": False},
            **{"post_self_attn_layernorm": False, "post_mlp_layernorm": False, "quantization_bit": 0},
        },
        to_published=dict,
        from_model=_glm_from_model,
    ),
    "LlamaConfig": Kind(
        family="pangu",
        model_type="llama",
        defaults=LLAMA_DEFAULTS,
        fixed={"extend_method": None, "scaling_factor": 1.0, "embedding_init_type": None},
        to_published=_llama_to_published,
        from_model=_llama_from_model,
    ),
}


class Network(NamedTuple):
    """A network that a file describes."""

    family: str
    model: ModelConfig
    size: str | None
    """Built-in size of the family, if it is one."""


def read_model(book: InputKeys, source: str) -> Network | None:
    """The network, with its keys noted; None where the file has none, or one of no family here.

    Raises:
        ConfigError: a value that is none.
    """
    kind = KINDS.get(str(book.peek(TYPE)))
    if kind is None:
        return None
    given = {key: _plain(book.peek(MODEL + key)) for key in (*kind.defaults, *kind.fixed) if MODEL + key in book}
    try:
        if (book.peek(EXPERTS) or 1) > 1:
            raise ConfigError(f"{book.peek(EXPERTS)} experts: give the model by --config")
        only(given, kind.fixed)
        fields = kind.way.read(kind.to_published({**kind.defaults, **given}))
    except ConfigError as error:
        book.note(TYPE, "not expressible", "; ".join(error.problems))
        return None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{book.given[TYPE].place}: {TYPE} {book.peek(TYPE)}: {error}") from None
    if kind.model_type == "llama":  # whose config.json has one key for both
        fields |= {ours: given.get(key, False) for ours, key in BIASES.items()}
    plain = {name: value for name, value in fields.items() if value is not None}
    model = fields_from(ModelConfig, Document(f"{source}: {MODEL.removesuffix('.')}", plain))
    if model.query_size == model.hidden_size:
        model = replace(model, head_dim=None)  # as sizes have it
    sizes = family_module(kind.family, "config").SIZES.items()
    size = next((name for name, known in sizes if replace(model, seq_len=known.seq_len) == known), None)
    told = f"--size {size}" if size else "--config: write it with --config-out FILE"
    for key in given:
        if key != "seq_length":  # which is a flag of its own
            book.note(MODEL + key, "renamed", told)
    book.note(TYPE, "renamed", f"--model {kind.family} {told}")
    return Network(kind.family, model, size)


def read_changes(book: InputKeys, family: str, size: str | None) -> ModelConfig | None:
    """The network where the file's numbers are not those of the size that `trainer.model_name` names; None where they are,
    or it names none.

    Raises:
        ConfigError: no network has these numbers.
    """
    theirs = {key: _plain(book.peek(key)) for key in OF_SIZE if _plain(book.peek(key)) is not None}
    if (activation := ACTIVATIONS.get(str(theirs.pop(ACTIVATION, None)))) is not None:
        theirs[ACTIVATION] = activation
    if size is None:
        for key in theirs:
            book.renote(key, "not expressible", NO_SIZE)
            book.note(key, "not expressible", NO_SIZE)
        return None
    known = family_module(family, "config").SIZES.get(size)
    if known is None:
        return None
    _note_default(book, known, size)
    for key, value, fixed in _fixed(book, known):
        book.note(key, "not expressible", f"{value}; --size {size} has {fixed}: give the model by --config")
    rates = {key: theirs.pop(key) for key in RATES if key in theirs}
    if len(set(rates.values())) > 1:
        for key in rates:
            book.note(key, "not expressible", "a network here has one dropout rate")
    elif rates:
        theirs |= rates
    told = {key: _of(known, OF_SIZE[key]) for key, value in theirs.items() if value != _of(known, OF_SIZE[key])}
    if not told:
        return None
    asked = {OF_SIZE[key]: theirs[key] for key in told}
    plain = {name: value for name, value in (known.to_dict() | asked).items() if value is not None}
    model: ModelConfig = fields_from(
        ModelConfig, Document(f"{book.given[next(iter(told))].place}: {MODEL[:-1]}", plain)
    )
    book.renote("trainer.model_name", "renamed", f"--model {family}")
    for key, value in told.items():
        why = f"--config: write it with --config-out FILE; --size {size} has {value}"
        book.renote(key, "renamed", why)
        book.note(key, "renamed", why)
    return model


def _fixed(book: InputKeys, known: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Keys of what is in another place of a model configuration than its numbers, their values, and those of a size."""
    experts = known.experts
    of_size: Values = {EXPERTS: experts.num_experts if experts else 1, MODEL + "use_moe": experts is not None}
    of_size[MODEL + "post_layernorm_residual"] = False
    if book.peek(ACTIVATION) not in (None, *ACTIVATIONS):
        of_size[ACTIVATION] = known.activation
    if experts:
        of_size |= {
            MOE + "num_experts_chosen": experts.experts_per_token,
            MOE + "capacity_factor": experts.capacity_factor,
        }
    for key, fixed in of_size.items():
        value = _plain(book.peek(key))
        if value is not None and value != fixed:
            yield key, value, fixed


def _note_default(book: InputKeys, known: ModelConfig, size: str) -> None:
    """Note MindFormers' default activation where it is not that of the size."""
    is_alpha = known.norm == "layer" and known.activation != DEFAULT_ACTIVATION
    if is_alpha and book.peek(ACTIVATION) is None:
        why = f"{DEFAULT_ACTIVATION} by default, --size {size} has {known.activation}: write it or give --config"
        book.add(ACTIVATION, book.given["trainer.model_name"].place, "approximated", why)


def _of(model: ModelConfig, name: str) -> Any:
    return model.ffn_size if name == "ffn_hidden_size" else getattr(model, name)


def _plain(value: Any) -> Any:
    """Convert "None" in YAML files, which YAML does not know, to None."""
    return None if value == "None" else value


def written_activation(model: ModelConfig) -> Values:
    """The activation of a network that is written by its name; empty where MindFormers has none of that name."""
    name = next((theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation), None)
    return {ACTIVATION: name} if name else {}


def written_model(family: str, model: ModelConfig) -> Values:
    """The section of a network of the families here; empty where it is none of these."""
    for name, kind in KINDS.items():
        if kind.family == family and model.norm == "rms":
            try:
                values = kind.from_model(model, kind.way.write(model))
            except ConfigError:
                continue
            return {TYPE: name, **{MODEL + key: value for key, value in values.items() if value is not None}}
    return {}
