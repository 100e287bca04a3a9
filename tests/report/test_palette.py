"""One palette: every method has its colour, in pictures and on the page."""

import re

from sparse_rl.learn.method import METHODS as PRESETS
from sparse_rl.report.page import page
from sparse_rl.report.palette import COLOURS, METHODS, colour, colours, places
from tests.helpers.planted_report import document


def test_every_method_has_a_colour_of_its_own():
    assert {*PRESETS, "dense"} == set(METHODS) and len(set(METHODS.values())) == len(METHODS)
    assert len({light for light, _ in COLOURS}) == len({dark for _, dark in COLOURS}) == len(COLOURS)
    assert colours(["shadow", "dense"]) == [colour("shadow"), colour("dense")]


def test_runs_of_one_method_and_unknown_ones_get_colours_that_no_method_here_has():
    found = places(["none", "sparse-rl", "mine", "none", "none"])
    assert found[:2] == [METHODS["none"], METHODS["sparse-rl"]] and len(set(found)) == 5
    assert not {*found[2:]} & {METHODS["none"], METHODS["sparse-rl"]}
    assert len(places(["none"] * 50)) == 50


def test_the_page_has_the_palette():
    style = page(document())
    for number, (light, dark) in enumerate(COLOURS):
        assert f"--run{number}: light-dark({light}, {dark});" in style
    assert not re.search(r"\{\{\w+\}\}", style)
