"""Public models by name: the shapes that decide how large their caches are, without a model hub.

`data/models.json` says what the config of the hub's repository `hub` says of the part that generates text; `source` is
where that was read: a copy of the config, or code that loads its weights. `layers` are repeated until there are
`num_hidden_layers` of them. Settings that decide neither a cache's bytes nor the number of weights are left out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

_DTYPE = "bfloat16"  # of all that are listed


@dataclass(frozen=True)
class KnownModel:
    """One public model."""

    hub: str  # its repository
    source: str  # address of where the numbers were read
    config: Mapping[str, Any]
    layers: tuple[str, ...] = ()  # kinds; none where all layers are alike

    def load_config(self) -> PreTrainedConfig:
        """Its config, of transformers' class for its type."""
        settings = dict(self.config)
        count = settings["num_hidden_layers"]
        if self.layers:
            kinds = (self.layers * count)[:count]
            settings["layer_types"] = [f"{kind}_attention" for kind in kinds]
        return AutoConfig.for_model(**settings, dtype=_DTYPE)


@cache
def known_models() -> Mapping[str, KnownModel]:
    """All of them, by the name that `windowkv plan` takes."""
    listed = json.loads((files("windowkv") / "data" / "models.json").read_text(encoding="utf-8"))
    return {name: KnownModel(**facts | {"layers": tuple(facts.get("layers", ()))}) for name, facts in listed.items()}


def known_model(name: str) -> KnownModel | None:
    """One of them, by its name or its repository's, in any case; None for another name."""
    wanted = name.lower()
    return next((model for key, model in known_models().items() if wanted in (key.lower(), model.hub.lower())), None)
