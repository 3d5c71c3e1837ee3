"""Notice that a model is no longer the one that was attached to.

Receives the sites once and says, step by step, whether a module was added or one with weights replaced, a parameter
exchanged, frozen or unfrozen: resize_token_embeddings, adapters added later, load_state_dict(assign=True).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pyscan.sites import Site


class ModelState:
    """Where every site's module and parameter were found."""

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        holders = {id(site.holder) for site in sites}
        parents = list(model.modules())
        # (children of the parent, key, module) for every module that holds a weight, or has one below that does
        self._places = [
            (parent._modules, key, child)
            for parent in parents
            for key, child in parent._modules.items()
            if child is not None and not holders.isdisjoint(map(id, child.modules()))
        ]
        self._families = [parent._modules for parent in parents if parent._modules]
        self._num_children = sum(map(len, self._families))
        named = {(id(site.holder), site.attribute): site for site in sites if site.parameter is not None}
        self._parameters = [
            (site.holder._parameters, site.attribute, site.parameter, site.trainable)
            for site in named.values()
            if site.parameter is not None and site.attribute in site.holder._parameters
        ]

    def changed(self) -> bool:
        if sum(map(len, self._families)) != self._num_children:
            return True
        for modules, key, module in self._places:
            if modules.get(key) is not module:
                return True
        for parameters, name, parameter, trainable in self._parameters:
            if parameters.get(name) is not parameter or parameter.requires_grad != trainable:
                return True
        return False
