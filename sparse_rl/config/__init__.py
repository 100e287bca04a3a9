from .budget import METRICS, Adaptive, Target
from .migrate import migrate
from .parse import load_recipe, make_recipe, parse_value, table_of_keys
from .recipe import (
    RECIPES,
    SECTIONS,
    EvalSettings,
    LearnSettings,
    ModelSettings,
    Recipe,
    RolloutSettings,
    RunSettings,
    TaskSettings,
    WarmupSettings,
)

__all__ = [
    "Adaptive",
    "EvalSettings",
    "LearnSettings",
    "METRICS",
    "ModelSettings",
    "RECIPES",
    "Recipe",
    "RolloutSettings",
    "RunSettings",
    "SECTIONS",
    "Target",
    "TaskSettings",
    "WarmupSettings",
    "load_recipe",
    "make_recipe",
    "migrate",
    "parse_value",
    "table_of_keys",
]
