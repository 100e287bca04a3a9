"""Recipes: their sections and keys, and how they are read from YAML and the command line."""

from .budget import METRICS, Adaptive, Target
from .learn import LearnSettings
from .migrate import earlier_values, migrate, missing_keys
from .parse import load_recipe, load_recipe_to_run, make_recipe, parse_value, table_of_keys
from .read import read_yaml, read_yaml_file
from .recipe import RECIPES, SECTIONS, ModelSettings, Recipe, RolloutSettings
from .sections import EvalSettings, RunSettings, ScorerSettings, WarmupSettings
from .task import TaskSettings

__all__ = [
    "METRICS",
    "RECIPES",
    "SECTIONS",
    "Adaptive",
    "EvalSettings",
    "LearnSettings",
    "ModelSettings",
    "Recipe",
    "RolloutSettings",
    "RunSettings",
    "ScorerSettings",
    "Target",
    "TaskSettings",
    "WarmupSettings",
    "earlier_values",
    "load_recipe",
    "load_recipe_to_run",
    "make_recipe",
    "migrate",
    "missing_keys",
    "parse_value",
    "read_yaml",
    "read_yaml_file",
    "table_of_keys",
]
