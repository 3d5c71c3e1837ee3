"""Notice that a model is no longer the one that was attached to.

Receives the sites once and says, step by step, whether a module was added or one with weights replaced, a parameter
exchanged, frozen or unfrozen: resize_token_embeddings, adapters added later, load_state_dict(assign=True).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pyscan import _C
from pyscan.sites import Site


class ModelState:
    """Where every site's module and parameter were found."""

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        holders = {id(site.holder) for site in sites}
        parents = list(model.modules())
        # Every module with a weight in it or below: the children of its parent, its key there, and itself.
        places: list[tuple[dict[str, Any], str, Any]] = [
            (parent._modules, key, child)
            for parent in parents
            for key, child in parent._modules.items()
            if child is not None and not holders.isdisjoint(map(id, child.modules()))
        ]
        families = [parent._modules for parent in parents if parent._modules]
        named = {(id(site.holder), site.attribute): site for site in sites if site.parameter is not None}
        held = [site for site in named.values() if site.attribute in site.holder._parameters]
        places += [(site.holder._parameters, site.attribute, site.parameter) for site in held]
        trainable = [(site.parameter, "requires_grad", site.trainable) for site in held]
        self.places = _C.ModelPlaces(families, places, trainable)
        self.changed: Callable[[], bool] = self.places.changed
