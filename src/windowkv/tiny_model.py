"""A model's tiny twin: the same code and the same kinds of layers, random weights, sizes that run in milliseconds.

Knows how a config is made smaller without becoming another architecture. Knows nothing of caches.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from windowkv.errors import TinyModelError
from windowkv.tiny_sizes import (
    DEPTHS,
    DROPOUT,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INITIALIZER,
    INTERMEDIATE,
    LAYERS,
    MEDIA_TOKENS,
    OUT_OF_REACH,
    ROTATED,
    SIZES,
    TEXT_PARTS,
    TEXT_WIDTHS,
    TOWER_DEPTHS,
    WINDOW,
    WINDOWS,
)

# In this order: the first that knows a config's type decides which class generates its text.
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
# Of a config: where it came from, and what only large weights need.
_NOT_CARRIED = {"model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "quantization_config"}
_NOT_CARRIED |= {"auto_map", "_name_or_path", "_attn_implementation", "attn_implementation", "use_cache"}
_NOT_CARRIED |= {"per_layer_config"}  # its numbers are for as many layers as there were
_NOT_TEXT = re.compile(r"vision|visual|audio|vq|image|mm_")
_NOT_MATRICES = re.compile(r"norm|A_log|conv")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # tokens of a tiny model, by their codes
_MODEST = (0.1, 0.6)  # standard deviations with which attention matters, and nothing overflows


def tiny_model(config: PreTrainedConfig, *, windows: bool = False) -> Any:
    """A model of the same architecture with few small layers, random weights and a window of 8, ready to generate.

    Every kind of layer in `layer_types` is kept, other settings of single layers (`per_layer_config`) are not.
    `windows` switches windows on where the config has them off. The same config always gives the same weights. Of a
    model of several parts whose whole cannot be built (a library is missing, say) it is the part that generates text.
    Raises TinyModelError where no such model can be made.
    """
    if config.is_encoder_decoder:
        raise TinyModelError(
            f"{type(config).__name__} describes an encoder and a decoder: tiny twins are made of decoders alone"
        )
    problem: TinyModelError | None = None
    for part in _parts(config):
        for tower_sizes in (True, False):
            try:
                return _built(part, windows, tower_sizes)
            except TinyModelError as error:
                problem = problem or error
    raise problem or _unheard_of(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for tiny models: a character of ASCII is a token, whose id is its code; any other is unknown (1)."""
    codes = {character: ord(character) for character in CHARACTERS}
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, **codes}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")


def _built(config: PreTrainedConfig, windows: bool, tower_sizes: bool) -> Any:
    model_class = generating_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            tiny = _shrunk(config, windows, tower_sizes)
            wanted, part = getattr(model_class, "config_class", None), tiny.get_text_config(decoder=True)
            takes_part = wanted is not None and not isinstance(tiny, wanted) and isinstance(part, wanted)
            model = model_class(part if takes_part else tiny).eval()
            _randomize(model)
            _generate_greedily(model)
            with torch.no_grad():
                model(input_ids=torch.arange(3, 12)[None], attention_mask=torch.ones(1, 9, dtype=torch.long))
        except Exception as error:  # whatever configs and modeling files do with sizes that nobody ships
            raise TinyModelError(
                f"no tiny twin of {type(config).__name__} (model_type={config.model_type!r}) can be built that reads "
                f"text alone: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
    return model


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config, and what in it generates text by itself, outermost first."""
    try:
        generating_class(config)
    except TinyModelError:
        pass
    else:
        yield config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig) and name in TEXT_PARTS:
            yield from _parts(value)


def generating_class(config: PreTrainedConfig) -> Any:
    """The class that generates text for a config: the one it names, else the one that transformers chooses."""
    mapped = (getattr(modeling_auto, name, {}).get(config.model_type) for name in _MAPPINGS)
    for name in (*(config.architectures or ()), *mapped):
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, GenerationMixin):
            return found
    raise _unheard_of(config)


def _unheard_of(config: PreTrainedConfig) -> TinyModelError:
    return TinyModelError(
        f"no class of transformers {transformers.__version__} generates text for {type(config).__name__} "
        f"(model_type={config.model_type!r}); the config of a causal language model would work"
    )


def _shrunk(config: PreTrainedConfig, windows: bool, tower_sizes: bool, *, text: bool = True) -> PreTrainedConfig:
    """A small one of the same class; what is no size stays as it is.

    What is no text part (a tower for images, say) always gets one layer, and small sizes only with `tower_sizes`: text
    never reaches it, but some need sizes that divide each other.
    """
    own = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    arguments = {name: value for name, value in config.to_diff_dict().items() if name not in _NOT_CARRIED}
    arguments |= _text_sizes(own, windows) if text else _tower_sizes(own, tower_sizes)
    for name, value in own.items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = _shrunk(value, windows, tower_sizes, text=text and name in TEXT_PARTS)
    for name, value in FAMILIES.get(config.model_type, {}).items():
        arguments[name] = _completed(arguments.get(name), value) if name == "rope_parameters" else value
    return type(config)(**arguments)


def _tower_sizes(own: Mapping[str, Any], small: bool) -> dict[str, Any]:
    depth = next((own[name] for name in TOWER_DEPTHS if _is_int(own.get(name))), None)
    sizes = {name: SIZES[name] for name, value in own.items() if small and name in SIZES and _is_int(value)}
    sizes |= {name: HIDDEN for name, value in own.items() if name in TEXT_WIDTHS and _is_int(value)}
    sizes |= {name: 1 for name, value in own.items() if name in TOWER_DEPTHS and _is_int(value)}
    lists = {name: value for name, value in own.items() if isinstance(value, (list, tuple))}
    return sizes | {name: value[:1] for name, value in lists.items() if len(value) == depth}


def _completed(own: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """A dict with what it lacks of another."""
    whole: dict[str, Any] = dict(own or {})
    for name, value in more.items():
        whole[name] = _completed(whole.get(name), value) if isinstance(value, dict) else whole.get(name, value)
    return whole


def _text_sizes(own: Mapping[str, Any], windows: bool) -> dict[str, Any]:
    kinds, shared = _kinds(own, windows), own.get("num_kv_shared_layers") or 0
    layers = 3 * len(kinds) if shared and kinds else max(LAYERS, 2 * len(kinds))
    sizes = {name: small for name, value in own.items() for small in _small(name, value, own, layers)}
    if own.get("layer_types"):
        sizes["layer_types"] = _cycled(kinds, layers)
    if own.get("layers_block_type"):
        sizes["layers_block_type"] = _cycled(kinds, layers)
    if shared:  # the last ones, so that each kind has a layer before them to share with
        sizes["num_kv_shared_layers"] = max(1, len(kinds))
    if windows:
        sizes |= {name: WINDOW for name in WINDOWS if name in own}
        sizes |= {name: True for name in ("use_sliding_window",) if name in own}
    if own.get("kv_lora_rank") is not None:  # what is cached is one head for all
        sizes |= {name: small for name, small in (("num_key_value_heads", HEADS), ("head_dim", ROTATED)) if name in own}
    return sizes | {"pad_token_id": 0}


def _kinds(own: Mapping[str, Any], windows: bool) -> list[str]:
    """The distinct kinds of layers, in order; with those that slide where windows are to be switched on."""
    kinds = list(dict.fromkeys(own.get("layer_types") or own.get("layers_block_type") or ()))
    return (
        [*kinds, "sliding_attention"] if windows and kinds == ["full_attention"] and "sliding_window" in own else kinds
    )


def _small(name: str, value: Any, own: Mapping[str, Any], layers: int) -> list[Any]:
    """What a value of a text part becomes, in a list; an empty one where it stays."""
    depth = next((own[each] for each in DEPTHS if _is_int(own.get(each))), None)
    if value is None and name == "head_dim":
        return [HEAD_DIM]  # some families never derive it
    if value is None or name in ("layer_types", "layers_block_type"):
        return []
    if name in DEPTHS:
        return [layers]
    if name in ("rope_parameters", "rope_scaling"):
        return [_small_rope(value, ROTATED if own.get("kv_lora_rank") is not None else HEAD_DIM)]
    if name in MEDIA_TOKENS:
        return [OUT_OF_REACH]
    if isinstance(value, float) and DROPOUT.search(name):
        return [0.0]
    if isinstance(value, (list, tuple)):
        return [_small_list(value, layers)] if len(value) == depth and value else []
    return [SIZES[name]] if name in SIZES and not isinstance(value, dict) else []


def _small_list(values: Sequence[Any], layers: int) -> list[Any]:
    """One value per layer: what varies goes on varying, and widths are small."""
    if all(_is_int(value) and value > INTERMEDIATE for value in values):
        return [INTERMEDIATE] * layers
    plain = all(isinstance(value, (str, int, float)) for value in values)
    return _cycled(list(dict.fromkeys(values)) if plain else list(values), layers)


def _small_rope(rope: Any, head_dim: int) -> Any:
    """Rotary parameters for small heads: sections in proportion, and no factor per dimension."""
    if not isinstance(rope, dict):
        return rope
    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        return {name: _small_rope(value, head_dim) for name, value in rope.items()}
    if any(isinstance(value, list) for name, value in rope.items() if name.endswith("_factor")):
        kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        return kept | {"rope_type": "default"}
    sections = rope.get("mrope_section")
    if not sections:
        return rope
    goal = int(head_dim // 2 * rope.get("partial_rotary_factor", 1.0))
    small = [max(1, section * goal // sum(sections)) for section in sections]
    return rope | {"mrope_section": [small[0] + goal - sum(small), *small[1:]]}


def _cycled(values: Sequence[Any], length: int) -> list[Any]:
    return [values[i % len(values)] for i in range(length)]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Give matrices of text layers a spread with which attention matters, however the family initialises them."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or _NOT_TEXT.search(name):
            continue
        if "sink" in name and weight.numel():
            weight.normal_(0, 1, generator=generator)
        elif weight.dim() >= 2 and weight.numel() > 1 and not _NOT_MATRICES.search(name):
            low, high = _MODEST
            if not low <= weight.float().std().item() <= high:
                weight.normal_(0, INITIALIZER, generator=generator)


def _generate_greedily(model: Any) -> None:
    """Let nothing end, suppress or repeat a text but the number of tokens asked for."""
    model.generation_config = GenerationConfig(
        pad_token_id=0, eos_token_id=None, bos_token_id=1, do_sample=False, max_length=None
    )
