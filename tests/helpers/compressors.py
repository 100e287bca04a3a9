"""Which compressors run on any model by their name alone."""

from sparse_rl import COMPRESSORS

STANDALONE = [name for name, cls in COMPRESSORS.items() if not cls.usage]  # the others need an argument or a beacon
EVICTING = [name for name in STANDALONE if COMPRESSORS[name].evicts_response]
