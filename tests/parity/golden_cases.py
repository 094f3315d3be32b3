# SPDX-License-Identifier: Apache-2.0
"""Published folders with the outputs of reference implementations, imported once for all tests of a module."""

import numpy as np
from conftest import shared
from mindspore import Tensor

from sporeloom.checkpoint.huggingface import import_published, open_published
from sporeloom.checkpoint.model_folder import load_config, load_weights
from sporeloom.models.family import family_module


def importer(root, cases, tmp_path_factory):
    """A function of a case's name: the folder of ours that its published one becomes, and the reference's outputs.

    Args:
        root: folder of the cases within ../shared.
        cases: name -> folder of a case.
    """
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "checkpoint"
            import_published(open_published(shared(f"{root}/{cases[name]}")), made[name])
        return made[name], np.load(shared(f"{root}/{cases[name]}/golden.npz"))

    return get


def training_network(folder):
    """Family, configuration and training network of a folder, with its weights."""
    family, config = load_config(folder)
    net, weights = family_module(family, "model").ModelWithLoss(config), load_weights(folder)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(weights[parameter.name.removeprefix("model.")]))
    return family, config, net
