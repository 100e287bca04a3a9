from .embedding import FILE, POSITIONS, BeaconEmbedding, add_beacon, beacon_of, check_chunk, install
from .files import load_beacon, save_beacon, without_beacon
from .layout import Beaconed, BeaconLayout, beaconed, fixed_chunk_ends, insert_beacons, random_chunk_ends

__all__ = [
    "BeaconEmbedding",
    "Beaconed",
    "FILE",
    "BeaconLayout",
    "POSITIONS",
    "add_beacon",
    "beacon_of",
    "beaconed",
    "check_chunk",
    "random_chunk_ends",
    "fixed_chunk_ends",
    "install",
    "insert_beacons",
    "load_beacon",
    "save_beacon",
    "without_beacon",
]
