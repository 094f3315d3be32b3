# SPDX-License-Identifier: Apache-2.0
"""Pictures of models have the parts that a configuration declares, in the order in which its network computes them."""

import dataclasses
import importlib
import re
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import ROOT

from sporeloom.models.family import FAMILIES, family_module, size_config

SPACE = "{http://www.w3.org/2000/svg}"
ALPHA = ["Token embedding", "Position embedding", "39 layers", "Final LayerNorm", "Top query layer", "Head"]
PREDICTS = "Final RMSNorm | Multi-token prediction"
STREAMS = "4 residual streams become one"
MODELS = {
    ("pangu", "13b"): ALPHA,
    ("pangu", "embedded_7b"): ["Token embedding", "34 layers", "Final RMSNorm", "Head"],
    ("pangu", "ultra_moe_718b"): ["Token embedding", "61 layers", PREDICTS, "Head"],
    ("pangu", "2_flash"): ["Token embedding", "46 layers", STREAMS, PREDICTS, "Head"],
    ("codegeex", "13b"): ALPHA,
    ("codegeex", "4_9b"): ["Token embedding", "40 layers", "Final RMSNorm", "Head"],
    ("palm", "540b"): ["Token embedding", "118 layers", "Final LayerNorm without bias", "Head"],
}
"""From tokens to logits, as in the header of pangu/model.py and in sporeloom/nn/decoder.py."""
ADD, READ, WRITE = "Add to the input", "Read 4 residual streams (mHC)", "Write to 4 residual streams (mHC)"
GROUPED, LATENT, SWIGLU = "Grouped-query attention", "Latent attention (MLA)", "MLP, SwiGLU"
LAYERS = {
    ("pangu", "13b"): ["LayerNorm", "Multi-head attention", ADD, "LayerNorm", "MLP, GELU", ADD],
    ("pangu", "embedded_7b"): ["RMSNorm", GROUPED, ADD, "RMSNorm", SWIGLU, ADD],
    ("pangu", "ultra_135b"): ["RMSNorm", GROUPED, "RMSNorm", ADD, "RMSNorm", SWIGLU, "RMSNorm", ADD],
    ("pangu", "2_flash"): [
        *(READ, "RMSNorm", LATENT, "RMSNorm", WRITE),
        *(READ, "RMSNorm", "Experts, SwiGLU", "RMSNorm", WRITE),
    ],
    ("codegeex", "13b"): ["LayerNorm", "Multi-head attention", ADD, "LayerNorm", "MLP, FastGELU", ADD],
    ("codegeex", "4_9b"): ["RMSNorm", GROUPED, ADD, "RMSNorm", SWIGLU, ADD],
    ("palm", "540b"): ["LayerNorm without bias", f"Multi-query attention | {SWIGLU}", "Add both to the input"],
}
"""From a layer's input to its output, as in `whole` of sporeloom/nn/blocks.py and hyper_connections.py."""


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("model_pictures")


def rows_of(svg, is_layer=False):
    """Read a column: (top, bottom) of each row -> the titles of its boxes, from the left."""
    root, found = ElementTree.fromstring(svg), {}
    texts = {(int(text.get("x")), int(text.get("y"))): text.text for text in root.iter(f"{SPACE}text")}
    for rect in root.iter(f"{SPACE}rect"):
        x, y, height = (int(rect.get(name)) for name in ("x", "y", "height"))
        if (x > 440) == is_layer:
            found.setdefault((y, y + height), {})[x] = texts[x + 12, y + 18]
    return {place: " | ".join(found[place][x] for x in sorted(found[place])) for place in sorted(found)}


def lines_of(svg):
    """(x, top, bottom) of the lines between the boxes of the model."""
    paths = [path.get("d") for path in ElementTree.fromstring(svg).iter(f"{SPACE}path")]
    ends = [tuple(map(int, re.fullmatch(r"M(\d+) (\d+) L\1 (\d+)", path).groups())) for path in paths]
    return [(x, top, bottom) for x, top, bottom in ends if x < 440]


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_the_boxes_of_a_model_are_in_the_order_of_its_computation(pictures, family, size):
    svg = pictures.picture(size_config(family, size), size)
    assert list(rows_of(svg).values()) == MODELS[family, size]


@pytest.mark.parametrize(("family", "size"), LAYERS)
def test_the_boxes_of_a_layer_are_in_the_order_of_its_computation(pictures, family, size):
    svg = pictures.picture(size_config(family, size), size)
    assert list(rows_of(svg, is_layer=True).values()) == LAYERS[family, size]


def test_every_family_has_its_order_checked():
    assert {family for family, _ in MODELS} == {family for family, _ in LAYERS} == set(FAMILIES)


def test_the_last_norm_is_where_the_configuration_puts_it(pictures):
    config = dataclasses.replace(size_config("pangu", "13b"), final_norm="after_query")
    expected = [*ALPHA[:3], "Top query layer", "Final LayerNorm", "Head"]
    assert list(rows_of(pictures.picture(config, "")).values()) == expected


def test_the_top_query_layer_has_its_own_table_of_queries(pictures):
    config = size_config("pangu", "13b")
    box = pictures.query_layer_of(config)
    assert f"an embedding of the position, {config.seq_len} rows" in box.details[0]
    assert f">One of the {config.num_layers - 1} layers<" in pictures.picture(config, "")


@pytest.mark.parametrize("mtp_input", ["before_norm", "after_norm"])
def test_multi_token_prediction_reads_hidden_states_and_leads_to_the_head(pictures, mtp_input):
    config = dataclasses.replace(size_config("pangu", "ultra_moe_718b"), mtp_input=mtp_input)
    svg = pictures.picture(config, "")
    rows, lines = rows_of(svg), lines_of(svg)
    places = list(rows)
    predicts = next(place for place, titles in rows.items() if "Multi-token prediction" in titles)
    above, head = places[places.index(predicts) - 1], places[-1]
    assert rows[above] == {"before_norm": "61 layers", "after_norm": "Final RMSNorm"}[mtp_input]
    assert rows[head] == "Head" and places.index(head) == places.index(predicts) + 1
    of_prediction = sorted((top, bottom) for x, top, bottom in lines if x > 220)
    assert of_prediction == [(above[1], predicts[0]), (predicts[1], head[0])]
    assert max(bottom for _, _, bottom in lines) == head[0]


def test_a_picture_shows_the_parts_that_a_model_declares(pictures):
    def words(family, size):
        root = ElementTree.fromstring(pictures.picture(size_config(family, size), size))
        return " ".join(text for text in root.itertext() if text.strip())

    flash, palm, alpha = words("pangu", "2_flash"), words("palm", "540b"), words("pangu", "13b")
    for part in ("Latent attention (MLA)", "residual streams", "sinks", "sparse attention", "Multi-token prediction"):
        assert part in flash
        assert part not in palm + alpha
    assert "Multi-query attention" in palm
    assert "LayerNorm without bias" in palm
    assert "Top query layer" in alpha
    assert "Multi-head attention" in alpha
    assert "4 of 40 " not in alpha
    assert "Grouped-query attention" in words("pangu", "embedded_7b")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_of_a_picture_fits_its_box(pictures, family):
    """Letters of 11 pixels are 6 wide in the mean, of 13 pixels 7."""
    for size in family_module(family, "config").SIZES:
        config = size_config(family, size)
        for row in (*pictures.model_of(config), *pictures.layer_of(config)):
            width = pictures.WIDTH // len(row) - 24
            for box in row:
                assert 7 * len(box.title) <= width, box
                assert all(6 * len(detail) <= width for detail in box.details), box
