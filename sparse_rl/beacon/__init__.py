from .choice import (
    add_choice,
    check_choice,
    choice_entropies,
    choice_logprobs,
    choice_parameters,
    chosen_before,
    mean_chunk,
    place_choices,
    start_logit,
)
from .embedding import FILE, POSITIONS, BeaconEmbedding, add_beacon, beacon_of, check_chunk, install
from .files import load_beacon, save_beacon, without_beacon
from .layout import Beaconed, BeaconLayout, beaconed, fixed_chunk_ends, insert_beacons, random_chunk_ends

__all__ = [
    "FILE",
    "POSITIONS",
    "BeaconEmbedding",
    "BeaconLayout",
    "Beaconed",
    "add_beacon",
    "add_choice",
    "beacon_of",
    "beaconed",
    "check_choice",
    "check_chunk",
    "choice_entropies",
    "choice_logprobs",
    "choice_parameters",
    "chosen_before",
    "fixed_chunk_ends",
    "insert_beacons",
    "install",
    "load_beacon",
    "mean_chunk",
    "place_choices",
    "random_chunk_ends",
    "save_beacon",
    "start_logit",
    "without_beacon",
]
