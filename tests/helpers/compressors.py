"""Which compressors run on any model by their name alone."""

from sparse_rl import COMPRESSORS

BY_NAME = [name for name, cls in COMPRESSORS.items() if not cls.usage]  # the others need an argument or a beacon
STANDALONE = [name for name in BY_NAME if not COMPRESSORS[name].learns]  # the others know a model
EVICTING = [name for name in STANDALONE if COMPRESSORS[name].evicts_response]
