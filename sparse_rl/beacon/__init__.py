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
    "beacon_of",
    "beaconed",
    "check_chunk",
    "fixed_chunk_ends",
    "insert_beacons",
    "install",
    "load_beacon",
    "random_chunk_ends",
    "save_beacon",
    "without_beacon",
]
